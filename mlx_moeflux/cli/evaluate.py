"""``mlx_moeflux evaluate``: mlx-lm's evaluation (lm-evaluation-harness) on our loader."""

from __future__ import annotations

import argparse
import sys
from unittest import mock

from mlx_moeflux.cli.common import (
    LOADING,
    add_load_arguments,
    add_model_arguments,
    load_options,
    refuse,
)
from mlx_moeflux.errors import UnsupportedError
from mlx_moeflux.installation import install_command

# Flags that mlx-lm's program reads itself, with its own defaults.
PASSED = ("--output-dir", "--batch-size", "--num-shots", "--max-tokens", "--limit", "--seed")
PASSED += ("--chat-template-args", "--temp", "--top-p", "--top-k")
SWITCHES = ("--fewshot-as-multiturn", "--apply-chat-template", "--no-apply-chat-template")
SWITCHES += ("--confirm-run-unsafe-code",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_model_arguments(parser)
    add("--tasks", nargs="+", required=True, help="names of lm-evaluation-harness")
    for flag in PASSED:
        add(flag, help="see mlx_lm.evaluate")
    for flag in SWITCHES:
        add(flag, action="store_true", help="see mlx_lm.evaluate")
    add_load_arguments(parser, *LOADING)
    refuse(parser, ("--trust-remote-code",))


def run(args: argparse.Namespace) -> int:
    from mlx_moeflux import loading
    from mlx_moeflux.checkpoint.hub import resolve
    from mlx_moeflux.checkpoint.model_name import parse_model_name
    from mlx_moeflux.mlx_lm_plugin import register_with_mlx_lm

    name = parse_model_name(
        args.model or loading.BUNDLED_MODEL, revision=args.revision, gguf_file=args.gguf_file
    )
    args.gguf_file = name.chosen
    register_with_mlx_lm(**load_options(args), verbose=True)
    try:
        from mlx_lm import evaluate
    except ImportError as error:
        raise UnsupportedError(
            f"evaluate needs lm-eval ({error}); install the extra 'evaluate' with "
            f"{install_command('mlx_moeflux[evaluate]')}."
        ) from error
    # mlx-lm takes a path or an id, and no revision.
    model = name.place
    if name.revision is not None:
        model = resolve(name.place, revision=name.revision)
    given = ["mlx_moeflux.evaluate", "--model", str(model)]
    given += ["--tasks", *args.tasks]
    for flag in PASSED:
        value = getattr(args, flag[2:].replace("-", "_"))
        given += [] if value is None else [flag, value]
    given += [flag for flag in SWITCHES if getattr(args, flag[2:].replace("-", "_"))]
    with mock.patch.object(sys, "argv", given):
        evaluate.main()
    return 0

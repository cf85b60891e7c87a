"""``mlx_moeflux evaluate``: mlx-lm's evaluation (lm-evaluation-harness) on our loader."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from unittest import mock

from mlx_moeflux.checks import check_integer
from mlx_moeflux.cli.common import (
    LOADING,
    add_load_arguments,
    add_model_arguments,
    json_object,
    load_options,
    refuse,
)
from mlx_moeflux.errors import InputError, UnsupportedError
from mlx_moeflux.installation import install_command

# Flags that mlx-lm's program reads itself, with its own defaults -> type.
PASSED = {
    "--output-dir": str, "--batch-size": int, "--num-shots": int, "--max-tokens": int,
    "--limit": int, "--seed": int, "--chat-template-args": str, "--temp": float, "--top-p": float,
    "--top-k": int,
}  # fmt: skip
SWITCHES = ("--fewshot-as-multiturn", "--apply-chat-template", "--no-apply-chat-template")
SWITCHES += ("--confirm-run-unsafe-code",)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_model_arguments(parser)
    add("--tasks", nargs="+", required=True, help="names of lm-evaluation-harness")
    for flag, kind in PASSED.items():
        add(flag, type=kind, help="see mlx_lm.evaluate")
    for flag in SWITCHES:
        add(flag, action="store_true", help="see mlx_lm.evaluate")
    add_load_arguments(parser, *LOADING)
    refuse(parser, ("--trust-remote-code",))


def run(args: argparse.Namespace) -> int:
    from mlx_moeflux import loading
    from mlx_moeflux.checkpoint.hub import resolve
    from mlx_moeflux.checkpoint.model_name import parse_model_name
    from mlx_moeflux.mlx_lm_plugin import register_with_mlx_lm

    _check_passed(args)
    name = parse_model_name(
        args.model or loading.BUNDLED_MODEL, revision=args.revision, gguf_file=args.gguf_file
    )
    args.gguf_file = name.chosen
    register_with_mlx_lm(**load_options(args), verbose=True)
    try:
        from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]
        from mlx_lm import evaluate
    except ImportError as error:
        raise UnsupportedError(
            f"evaluate needs lm-eval ({error}); install the extra 'evaluate' with "
            f"{install_command('mlx_moeflux[evaluate]')}."
        ) from error
    _check_tasks(args.tasks, TaskManager().all_tasks)
    # mlx-lm takes a path or an id, and no revision.
    model = name.place
    if name.revision is not None:
        model = resolve(name.place, revision=name.revision)
    given = ["mlx_moeflux.evaluate", "--model", str(model)]
    given += ["--tasks", *args.tasks]
    for flag in PASSED:
        value = getattr(args, flag[2:].replace("-", "_"))
        given += [] if value is None else [flag, str(value)]
    given += [flag for flag in SWITCHES if getattr(args, flag[2:].replace("-", "_"))]
    try:
        with mock.patch.object(sys, "argv", given):
            evaluate.main()
    except OSError as error:
        raise InputError(f"lm-eval cannot read its data or write its results: {error}.") from error
    return 0


def _check_passed(args: argparse.Namespace) -> None:
    """Raise an InputError unless mlx-lm's program can use the values of its flags."""
    from mlx_moeflux.generation.sampling import make_sampler

    least = {"batch_size": 1, "num_shots": 0, "max_tokens": 1, "limit": 1, "seed": 0}
    for name, low in least.items():
        if getattr(args, name) is not None:
            check_integer(f"--{name.replace('_', '-')}", getattr(args, name), low)
    sampling = {name: getattr(args, name) for name in ("temp", "top_p", "top_k")}
    make_sampler(**{name: value for name, value in sampling.items() if value is not None})
    if args.chat_template_args is not None:
        json_object("--chat-template-args", args.chat_template_args)


def _check_tasks(tasks: Sequence[str], known: Collection[str]) -> None:
    """Raise an InputError unless each task is one of those known or a file."""
    for task in tasks:
        if task not in known and not Path(task).is_file():
            near = difflib.get_close_matches(task, known, n=1, cutoff=0.6)
            mend = f"did you mean '{near[0]}'?" if near else "'lm-eval ls tasks' lists them."
            raise InputError(f"--tasks has {task!r}, which lm-eval does not know; {mend}")

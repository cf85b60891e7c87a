"""``mlx_moeflux cache_prompt``: process a prompt once, for ``generate --prompt-cache-file``."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from mlx_moeflux.cli.common import (
    LOADING,
    add_load_arguments,
    add_model_arguments,
    add_prompt_arguments,
    add_stats_arguments,
    check_text,
    given_prompt,
    load_options,
    refuse,
    stats_table,
)
from mlx_moeflux.cli.messages import Bar
from mlx_moeflux.errors import InputError

REFUSED = ("--adapter-path", "--max-kv-size", "--quantized-kv-start", "--trust-remote-code")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_model_arguments(parser)
    add_prompt_arguments(parser)
    add("--prompt-cache-file", required=True, metavar="FILE", help="file to write")
    add("--eos-token", help="end of the sequence, for the template")
    add("--prefill-step-size", type=int, help="tokens a call (default: the whole prompt)")
    add_load_arguments(parser, *LOADING)
    add_stats_arguments(parser)
    refuse(parser, REFUSED)


def run(args: argparse.Namespace) -> int:
    from mlx_moeflux import loading
    from mlx_moeflux.checkpoint.model_name import parse_model_name
    from mlx_moeflux.generation import text

    text.check_numbers(0, args.prefill_step_size, None)
    check_text("--eos-token", args.eos_token or "")
    prompt: Any = given_prompt(args)
    if prompt is None:
        raise InputError("there is no prompt; give --prompt, --prompt-file or standard input.")
    settings = {"eos_token": args.eos_token} if args.eos_token else {}
    model, tokenizer = loading.load(
        args.model or loading.BUNDLED_MODEL,
        tokenizer_config=settings,
        revision=args.revision,
        **load_options(args),
        verbose=True,
    )
    with model:
        options = {}
        if tokenizer.chat_template is not None:
            prompt = [{"role": "user", "content": prompt}]
            options = {"continue_final_message": True}
        state = model.make_cache()
        with Bar("prompt", "tok") as bar:
            (last,) = text.stream_generate(
                model,
                tokenizer,
                prompt,
                max_tokens=0,
                template_options=options,
                prompt_cache=state,
                prefill_step_size=args.prefill_step_size,
                prompt_progress_callback=bar.update,
            )
        notes = {}
        if args.model:
            name = parse_model_name(args.model, revision=args.revision, gguf_file=args.gguf_file)
            notes = {"model": str(name)}
        size = state.save(args.prompt_cache_file, notes=notes)
        if args.stats:
            table = stats_table(last.experts, model, details=args.details, written=size)
            print(table, file=sys.stderr)
        print(
            f"wrote {args.prompt_cache_file}: {state.position} tokens, {size / 1e6:.1f} MB",
            file=sys.stderr,
        )
    return 0

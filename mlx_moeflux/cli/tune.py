"""``mlx_moeflux tune``: measure what suits this machine and model."""

from __future__ import annotations

import argparse
import sys

from mlx_moeflux.errors import InputError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", help="directory or Hugging Face id (default: the bundled model)")
    add("--out", default="tuning.json", help="file to write, for --tuning, default %(default)s")
    add("--budgets", nargs="+", metavar="SIZE", help="expert memory to try, such as 2GB 4GB 8GB")
    add("--tokens", type=int, default=32, help="of each decode, default %(default)s")
    add("--repeats", type=int, default=3, help="of each measurement, default %(default)s")


def run(args: argparse.Namespace) -> int:
    from mlx_moeflux.loading import BUNDLED_MODEL
    from mlx_moeflux.tuning import tune

    if args.tokens < 1 or args.repeats < 1:
        raise InputError("--tokens and --repeats must be at least 1.")
    result = tune(
        args.model or BUNDLED_MODEL,
        budgets=args.budgets,
        tokens=args.tokens,
        repeats=args.repeats,
        report=lambda line: print(line, file=sys.stderr),
    )
    result.save(args.out)
    print(
        f"{args.out}: --expert-memory {result.expert_memory} --expert-reader "
        f"{result.expert_reader} --expert-threads {result.expert_threads} --prefetch "
        f"{result.prefetch}"
    )
    return 0

"""``mlx_moeflux tune``: measure the best settings of a model, or kernels, on this machine."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from mlx_moeflux.cli.common import add_load_arguments, add_model_arguments, load_options
from mlx_moeflux.errors import InputError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_model_arguments(parser)
    add(
        "--out",
        help="file to write, for --tuning, default tuning.json; with --kernels for "
        "$MOEFLUX_DISPATCH, default: kept for this machine and used from then on",
    )
    add("--budgets", nargs="+", metavar="SIZE", help="expert memory to try, such as 2GB 4GB 8GB")
    add("--max-tokens", type=int, default=32, help="of each decode, default %(default)s")
    add("--repeats", type=int, default=3, help="of each measurement, default %(default)s")
    add(
        "--kernels",
        nargs="*",
        metavar="OPERATION",
        help="measure implementations of these operations (all) instead, on the calls of --model, "
        "or without it in published sizes",
    )
    add_load_arguments(parser, "gguf_file", "strict_config")


def run(args: argparse.Namespace) -> int:
    if args.kernels is not None:
        return _run_kernels(args)
    from mlx_moeflux.checkpoint.hub import resolve
    from mlx_moeflux.experts.budget import parse_budget
    from mlx_moeflux.loading import BUNDLED_MODEL
    from mlx_moeflux.measure.tune import tune

    out = args.out or "tuning.json"
    if args.max_tokens < 1 or args.repeats < 1:
        raise InputError("--max-tokens and --repeats must be at least 1.")
    for budget in args.budgets or ():
        parse_budget(budget, 10**12)
    if not Path(out).absolute().parent.is_dir():
        raise InputError(f"{out} cannot be written: there is no such directory.")
    result = tune(
        resolve(args.model or BUNDLED_MODEL, revision=args.revision, gguf_file=args.gguf_file),
        budgets=args.budgets,
        tokens=args.max_tokens,
        repeats=args.repeats,
        strict_config=args.strict_config,
        report=lambda line: print(line, file=sys.stderr),
    )
    result.save(out)
    print(
        f"{out}: --expert-memory {result.expert_memory} --expert-reader "
        f"{result.expert_reader} --expert-threads {result.expert_threads} --prefetch "
        f"{result.prefetch}"
    )
    return 0


def _run_kernels(args: argparse.Namespace) -> int:
    from mlx_moeflux.kernels import dispatch
    from mlx_moeflux.kernels.runtime import launcher
    from mlx_moeflux.kernels.verify.tune import keep, tune, write
    from mlx_moeflux.loading import load
    from mlx_moeflux.measure.model_calls import calls_of

    def report(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    calls = None
    if args.model is not None:
        memory = args.budgets[0] if args.budgets else "auto"
        model, _ = load(
            args.model,
            revision=args.revision,
            **load_options(args),
            expert_memory=memory,
            verbose=True,
        )
        calls = calls_of(model)
        del model
    table = tune(args.kernels, calls=calls, report=report)
    if args.out:
        write(table, args.out)
        used = f"{args.out}: use it with {dispatch.ENVIRONMENT}={args.out}"
    else:
        used = f"{keep(table)}: used from now on; delete it to undo"
    backend = launcher.backend().name
    for operation, backends in table.items():
        if operation != dispatch.MEASURED and backend in backends:
            names = [f"{row['form']} from {row['from']}" for row in backends[backend]]
            print(f"{operation:<18} {', '.join(names)}")
    print(used)
    return 0

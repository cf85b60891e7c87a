"""``mlx_moeflux report``: everything that a maintainer asks about a machine, in one file."""

from __future__ import annotations

import argparse
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from mlx_moeflux.cli.check import MLX_LM
from mlx_moeflux.cli.common import add_load_arguments, add_model_arguments


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_model_arguments(parser, text="also measure this checkpoint, instead of a synthetic one")
    add("--out", default="mlx_moeflux-report", help="files without ending, default %(default)s")
    add("--seconds", type=float, default=600, help="for everything, default %(default)s")
    add("--against", choices=(MLX_LM,), help="also run check --against, on the same model")
    add_load_arguments(parser, "gguf_file", "strict_config")


def run(args: argparse.Namespace) -> int:
    """Run the steps and write both files; return 130 after Ctrl-C, 1 if a step failed."""
    from tqdm import tqdm

    from mlx_moeflux.checkpoint.hub import resolve
    from mlx_moeflux.errors import InputError
    from mlx_moeflux.measure.machine_report import Step, check_outputs, run_steps, steps, write

    if not args.seconds > 0:
        raise InputError("--seconds must be positive.")
    files = check_outputs(Path(args.out).absolute())
    model = None
    if args.model is not None:
        model = str(resolve(args.model, revision=args.revision, gguf_file=args.gguf_file))
    with tempfile.TemporaryDirectory(prefix="mlx_moeflux-") as name:
        folder = Path(name)
        options = {"strict_config": args.strict_config, "against": args.against}
        chosen = steps(folder, model, **options)
        if args.allow_sleep:
            chosen = [replace(s, arguments=(*s.arguments, "--allow-sleep")) for s in chosen]
        silent = not sys.stderr.isatty()
        with tqdm(total=len(chosen), unit="step", desc="report", disable=silent) as bar:

            def begin(step: Step) -> None:
                bar.update(chosen.index(step) - bar.n)
                bar.set_description(step.title)

            report = run_steps(chosen, folder, seconds=args.seconds, report=begin)
            bar.update(len(chosen) - bar.n)
    write(report, files)
    for outcome in report.outcomes:
        print(f"{outcome.title:<36} {outcome.status:<12} {outcome.seconds:5.0f} s")
    print(f"wrote {files[0]} and {files[1]}")
    if not report.complete:
        return 130
    return 0 if all(outcome.status == "ok" for outcome in report.outcomes) else 1

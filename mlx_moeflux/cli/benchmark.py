"""``mlx_moeflux benchmark``: mlx-lm's flags and output; budgets, contexts, comparison, limits."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from mlx_moeflux.cli.common import (
    RANKS,
    add_load_arguments,
    add_model_arguments,
    leads,
    refuse,
    silence,
)
from mlx_moeflux.cli.profile_flags import add_profile_arguments, trace_file
from mlx_moeflux.errors import InputError
from mlx_moeflux.loading.options import LoadOptions

REFUSED = {
    "--pipeline": "several machines share the experts of every layer, with --distributed",
    "--quantize-activations": "activations stay in the compute dtype",
    "--trust-remote-code": "no code from a checkpoint runs",
}
# Options of loading that are passed on as they are.
LOADED = ("drafts", "mtp_path", "experts_per_token", "max_context", "strict_config", *RANKS)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add_model_arguments(parser)
    add("--prompt-tokens", "-p", type=int, default=512, help="default %(default)s")
    add("--generation-tokens", "-g", type=int, default=1024, help="default %(default)s")
    add("--batch-size", "-b", type=_counts, default=(1,), metavar="N,...", help="default 1")
    add("--num-trials", "-n", type=int, default=5, help="default %(default)s")
    add("--prefill-step-size", type=int, help="tokens a call (default: all; mlx-lm: 2048)")
    add("--delay", type=float, default=0, help="seconds before each trial, default %(default)s")
    add("--context", type=_counts, metavar="N,...", help="prompt lengths, instead of -p")
    add(
        "--expert-memory",
        type=_words,
        default=("auto",),
        metavar="SIZE,...",
        help="budgets, such as 100%%,50%%,2GB (default: auto)",
    )
    add("--compare", metavar="mlx-lm", help="another program to measure in interleaved trials")
    add("--synthetic", metavar="NAME", help="random weights of a shape, see 'shapes'")
    add("--layers", type=int, help="number of layers of the synthetic model")
    add("--skew", type=float, default=1.0, help="of its routing, default %(default)s")
    add("--synthetic-dir", help="keep the synthetic model here, and use it if it is there")
    add(
        "--cold",
        action="store_true",
        help="empty the page cache before trials and between tokens, or pass it by (macOS)",
    )
    add_load_arguments(parser, "expert_reader")
    add("--expert-threads", type=int, default=8, help="default %(default)s")
    add_load_arguments(parser, "gguf_file", *LOADED)
    add("--seed", type=int, default=0, help="of the ids, default %(default)s")
    add("--markdown", type=Path, metavar="FILE", help="append a table of the results")
    add("--plot", type=Path, metavar="FILE.png", help="draw the results")
    add_profile_arguments(parser)
    refuse(parser, REFUSED, REFUSED)


def run(args: argparse.Namespace) -> int:
    from mlx_moeflux.checkpoint.files import uncached
    from mlx_moeflux.measure.benchmark import report as output
    from mlx_moeflux.measure.benchmark.bench import Options, benchmark

    if args.plot:
        output.require_matplotlib()
    for file in filter(None, (args.plot, args.markdown)):
        if not file.parent.is_dir():
            raise InputError(f"{file.parent} is not a directory; create it or choose another.")
        if file.exists() and not file.is_file():
            raise InputError(f"{file} is no regular file; choose another.")
    if args.distributed and (args.compare or len(args.expert_memory) > 1):
        raise InputError("--distributed measures one budget, and nothing beside it.")
    load = {name: getattr(args, name) for name in LOADED}
    if args.distributed and not leads():
        args.markdown = args.plot = None
        silence()
    options = Options(
        expert_memory=args.expert_memory,
        contexts=args.context or (args.prompt_tokens,),
        generation_tokens=args.generation_tokens,
        batch_sizes=args.batch_size,
        trials=args.num_trials,
        delay=args.delay,
        prefill_step_size=args.prefill_step_size,
        compare=args.compare,
        cold=args.cold,
        threads=args.expert_threads,
        reader=args.expert_reader,
        seed=args.seed,
        profile=args.profile is not None,
        trace=trace_file(args),
        capture=_capture(args),
        load={n: value for n, value in load.items() if value != getattr(LoadOptions, n)},
    )
    options.check()
    # A synthetic checkpoint is written past the page cache, too.
    past = uncached() if args.cold else nullcontext()
    with past, _checkpoint(args) as (directory, name):
        report = benchmark(
            directory, options, name=name, command=_command(args), say=partial(print, flush=True)
        )
    if args.markdown:
        output.write_markdown(report, args.markdown)
    if args.plot:
        output.plot(report, args.plot)
    print(json.dumps(report.as_dict()))
    return 0


def _command(args: argparse.Namespace) -> str:
    """Return the command line that repeats the measurement, without its output files."""
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    places = ("markdown", "plot", "synthetic_dir", "profile", "gpu_capture")
    words = ["mlx_moeflux benchmark"]
    for action in parser._actions:
        value = getattr(args, action.dest, action.default)
        named = action.dest not in places and action.option_strings
        if not named or value == action.default or value is None:
            continue
        words.append(action.option_strings[0])
        if isinstance(value, tuple):
            words.append(",".join(str(part) for part in value))
        elif not isinstance(value, bool):
            words.append(str(value))
    return " ".join(words)


def _capture(args: argparse.Namespace) -> dict[str, Any] | None:
    if not args.gpu_capture:
        return None
    return {"file": args.gpu_capture, "layer": args.capture_layer, "token": args.capture_token}


@contextmanager
def _checkpoint(args: argparse.Namespace) -> Iterator[tuple[Path, str]]:
    """Yield the checkpoint's directory and its name; a temporary synthetic one is deleted."""
    from mlx_moeflux.checkpoint.hub import resolve
    from mlx_moeflux.loading import BUNDLED_MODEL

    if args.synthetic is None:
        for flag in ("layers", "synthetic_dir"):
            if getattr(args, flag) is not None:
                raise InputError(f"--{flag.replace('_', '-')} needs --synthetic.")
        name = Path(args.model).name if args.model else "the bundled model"
        yield (
            resolve(args.model or BUNDLED_MODEL, revision=args.revision, gguf_file=args.gguf_file),
            name,
        )
        return
    if args.model is not None:
        raise InputError("give either --model or --synthetic.")
    layers = f", {args.layers} layers" if args.layers else ""
    name = f"{args.synthetic}{layers}, skew {args.skew:g}"
    if args.synthetic_dir is not None:
        folder = Path(args.synthetic_dir)
        if not (folder / "config.json").exists():
            _synthesize(args, folder)
        yield folder, f"synthetic {name}"
        return
    with tempfile.TemporaryDirectory(prefix="mlx_moeflux-") as folder:
        yield _synthesize(args, Path(folder)), f"synthetic {name}"


def _synthesize(args: argparse.Namespace, folder: Path) -> Path:
    from mlx_moeflux.conversion.synthesize import synthesize

    return synthesize(args.synthetic, folder, layers=args.layers, skew=args.skew, seed=args.seed)


def _words(text: str) -> tuple[str, ...]:
    words = tuple(word.strip() for word in text.split(","))
    if not all(words):
        raise argparse.ArgumentTypeError(f"{text!r} has an empty entry")
    return words


def _counts(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(word) for word in _words(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers") from None

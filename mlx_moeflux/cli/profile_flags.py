"""Options of per-stage profiles and GPU captures."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from mlx_moeflux.errors import InputError

if TYPE_CHECKING:
    from mlx_moeflux.models.decoder import DecoderModel

TABLE_ONLY = "-"


def add_profile_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--profile",
        nargs="?",
        const=TABLE_ONLY,
        metavar="FILE.json",
        help="print seconds by stage, each evaluated separately; also write a Chrome trace",
    )
    add("--gpu-capture", metavar="FILE.gputrace", help="capture one layer of one step (Metal)")
    add("--capture-layer", type=int, default=0, help="default %(default)s")
    add("--capture-token", type=int, default=10, help="decode step, default %(default)s")


def trace_file(args: argparse.Namespace) -> Path | None:
    """Return the file of the trace, or None.

    Raises:
        InputError: Its directory does not exist.
    """
    if args.profile in (None, TABLE_ONLY):
        return None
    file = Path(args.profile)
    if not file.parent.is_dir():
        raise InputError(f"{file.parent} is not a directory; create it or choose another.")
    return file


@contextmanager
def instrument(args: argparse.Namespace, model: DecoderModel) -> Iterator[None]:
    """Profile and capture the calls inside the block; print the table to stderr."""
    from mlx_moeflux.measure.profile.capture import gpu_capture
    from mlx_moeflux.measure.profile.stages import Profiler

    file, profiler = trace_file(args), None
    with ExitStack() as stack:
        if args.gpu_capture:
            layer, token = args.capture_layer, args.capture_token
            stack.enter_context(gpu_capture(model, args.gpu_capture, layer=layer, token=token))
        if args.profile:
            profiler = stack.enter_context(Profiler(model))
        yield
    if profiler is not None:
        print(profiler.table(), file=sys.stderr)
        if file is not None:
            profiler.write_trace(file)

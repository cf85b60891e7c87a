"""One layer of one decode step in a Metal GPU trace, for Xcode."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_moeflux.errors import InputError, UnsupportedError
from mlx_moeflux.measure.profile.instrument import Retyped, evaluate, uncompiled
from mlx_moeflux.models.decoder import DecoderModel


def check_capture(file: str | Path) -> Path:
    """The file as a path, if a capture can go there; raises as :func:`gpu_capture` does."""
    file = Path(file)
    if not mx.metal.is_available():
        raise UnsupportedError("a GPU capture needs Metal, which this machine does not have.")
    if file.suffix != ".gputrace" or file.exists():
        raise InputError(f"{file} exists or does not end in .gputrace; give another name.")
    return file


@contextmanager
def gpu_capture(
    model: DecoderModel, file: str | Path, *, layer: int = 0, token: int = 10
) -> Iterator[None]:
    """Write the commands of `layer` in the `token`-th decode step (from 1) to ``FILE.gputrace``.

    The capture ends with the layer, also after an error. Compiled functions run as written.

    Raises:
        UnsupportedError: There is no Metal, or capturing is not enabled.
        InputError: The layer or file cannot be used, or generation ended before the token.
    """
    file = check_capture(file)
    if not 0 <= layer < len(model.layers):
        raise InputError(f"layer {layer} does not exist; the model has {len(model.layers)}.")
    if token < 1:
        raise InputError(f"the capture token is {token}; the first decode step is 1.")
    steps = 0

    def around(original: Any, arguments: tuple, options: dict) -> Any:
        nonlocal steps
        if arguments[0].shape[1] == 1:
            steps += 1
        if arguments[0].shape[1] != 1 or steps != token:
            return original(*arguments, **options)
        evaluate(arguments, options)
        mx.synchronize()
        _start(file)
        try:
            result = original(*arguments, **options)
            evaluate(result, arguments, options)
            return result
        finally:
            mx.metal.stop_capture()

    watched = Retyped()
    watched.watch(model.layers[layer], "__call__", around)
    try:
        with uncompiled():
            yield
    finally:
        watched.restore()
    if steps < token:
        raise InputError(
            f"nothing was captured: generation ended after {steps} decode steps, before step "
            f"{token}; give a lower --capture-token."
        )


def _start(file: Path) -> None:
    try:
        mx.metal.start_capture(str(file))
    except RuntimeError as error:
        raise UnsupportedError(
            f"Metal cannot capture to {file} ({error}); set MTL_CAPTURE_ENABLED=1."
        ) from error

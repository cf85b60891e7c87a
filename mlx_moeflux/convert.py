"""From a checkpoint in any accepted form to our packed directory, or to what mlx-lm loads.

Everything moves in row chunks: no tensor is held whole, and nothing is visible under its final
name before it is complete. A killed conversion goes on where it stopped (packed layout).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx

from mlx_moeflux.checkpoint.hub import resolve
from mlx_moeflux.checkpoint.packed import verify
from mlx_moeflux.checkpoint.quantization import QuantSpec
from mlx_moeflux.checkpoint.source import open_checkpoint
from mlx_moeflux.checkpoint.tensors import TensorIndex
from mlx_moeflux.conversion.claim import claim
from mlx_moeflux.conversion.plan import LAYOUTS, Conversion
from mlx_moeflux.conversion.recipe import CHUNK_ELEMENTS, CODES
from mlx_moeflux.conversion.write import write
from mlx_moeflux.errors import CheckpointError, InputError
from mlx_moeflux.models.weights import FLOATS

Progress = Callable[[int, int], None]


def convert(
    path_or_hub_id: str | os.PathLike[str],
    out: str | os.PathLike[str] = "mlx_model",
    *,
    layout: str = "packed",
    quantize: bool = False,
    q_bits: int = 4,
    q_group_size: int = 64,
    q_mode: str = "affine",
    dequantize: bool = False,
    dtype: str | None = None,
    verify_written: bool = False,
    strict_config: bool = True,
    revision: str | None = None,
    progress: Progress | None = None,
) -> Path:
    """Convert a checkpoint; returns the directory that was written.

    Args:
        layout: ``packed`` (one blob of experts per layer, one read each) or ``safetensors``
            (mlx-lm's names and config).
        quantize: Float weights become q_bits in groups of q_group_size; the router and the shared
            expert's gate 8 bits, as mlx-lm does. Without it bits stay as they are.
        dequantize: Quantised weights become floats.
        dtype: ``float32``, ``bfloat16`` or ``float16`` of the floats; default: as they are.
        verify_written: Read everything back and compare hashes.
        progress: Called with (bytes done, bytes in all).

    Peak memory: one row chunk (64 MiB in float32, a few times) beside the interpreter.

    Raises:
        InputError, CheckpointError, MemoryBudgetError (the disk has no room), ExpertFileError.
    """
    if layout not in LAYOUTS:
        raise InputError(f"layout is {layout!r}; there are {', '.join(LAYOUTS)}.")
    if dtype is not None and dtype not in CODES:
        raise InputError(f"dtype is {dtype!r}; there are {', '.join(CODES)}.")
    if quantize and dequantize:
        raise InputError("give either quantize or dequantize, not both.")
    spec = QuantSpec(q_bits, q_group_size, q_mode) if quantize else None
    directory, out = resolve(path_or_hub_id, revision=revision), Path(out)
    checkpoint = open_checkpoint(directory)
    if out.exists() and out.resolve() == directory.resolve():
        raise InputError(f"{out} is the checkpoint itself; give another directory.")
    conversion = Conversion(
        checkpoint,
        layout=layout,
        spec=spec,
        dequantize=dequantize,
        dtype=dtype,
        strict=strict_config,
    )
    identity = conversion.identity()
    done = 0

    def report(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(done, conversion.total_bytes)

    with claim(out, identity, needed=conversion.total_bytes):
        write(conversion, out, identity, report)
    if verify_written:
        _verify(out, layout)
    return out


def _verify(out: Path, layout: str) -> None:
    if layout == "packed":
        verify(out)
    for ref in TensorIndex.open(out).values():
        if ref.dtype in FLOATS and ref.shape:
            rows = max(1, CHUNK_ELEMENTS * ref.shape[0] // max(1, ref.nbytes))
            for start in range(0, ref.shape[0], rows):
                part = ref.rows(start, min(start + rows, ref.shape[0])).load()
                if not mx.isfinite(part).all().item():
                    raise CheckpointError(
                        f"{ref.file}: '{ref.name}' holds values that are not finite."
                    )

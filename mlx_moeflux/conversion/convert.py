"""From a checkpoint in any accepted form to our packed directory, or to what mlx-lm loads.

Everything moves in row chunks: no tensor is held whole, and nothing is visible under its final
name before it is complete. One conversion owns its output directory: a lock while it runs, a marker
until it is done. A killed conversion goes on where it stopped (packed layout).
"""

from __future__ import annotations

import fcntl
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import mlx.core as mx

from mlx_moeflux.backend import use_mlx
from mlx_moeflux.checkpoint.files import (
    TEMPORARY_SUFFIX,
    Progress,
    Report,
    counted,
    read_json_object,
    read_whole,
    unwritable,
    write_output,
)
from mlx_moeflux.checkpoint.formats.packed import PackedWriter, verify
from mlx_moeflux.checkpoint.hub import resolve
from mlx_moeflux.checkpoint.names import GLOBAL_SCALE, PROJECTIONS
from mlx_moeflux.checkpoint.quantization import MX_MODES, QuantSpec
from mlx_moeflux.checkpoint.source import CONFIG_NAME, open_checkpoint
from mlx_moeflux.checkpoint.tensors import TensorIndex
from mlx_moeflux.checkpoint.writer import SafetensorsWriter, Tensor, write_json
from mlx_moeflux.conversion.plan import CHUNK_ELEMENTS, CODES, LAYOUTS, Conversion, Recipe
from mlx_moeflux.distributed.placement import ById, Placement, shard_of
from mlx_moeflux.errors import CheckpointError, InputError, MemoryBudgetError
from mlx_moeflux.experts.io.layout import Component
from mlx_moeflux.models.weights import FLOATS


def convert(
    path_or_hub_id: str | os.PathLike[str],
    out: str | os.PathLike[str] = "mlx_model",
    *,
    layout: str = "packed",
    quantize: bool = False,
    q_bits: int | None = None,
    q_group_size: int | None = None,
    q_mode: str = "affine",
    dequantize: bool = False,
    requantize: bool = False,
    dtype: str | None = None,
    verify_written: bool = False,
    strict_config: bool = True,
    revision: str | None = None,
    gguf_file: str | None = None,
    shard: str | None = None,
    placement: str | Placement = ById.name,
    progress: Progress | None = None,
    mlx_path: str | os.PathLike[str] | None = None,
    mtp: bool = True,
) -> Path:
    """Convert a checkpoint; returns the directory that was written. Tensors of images are left out.

    Args:
        layout: ``packed`` (one blob of experts per layer, one read each) or ``safetensors``
            (mlx-lm's names and config).
        quantize: Float weights become q_bits in groups of q_group_size, in mlx-lm's mode; the
            router and the shared expert's gate affine 8 bits, as mlx-lm does. Bits and group size
            are 4 and 64, or those of the mode. Without it bits stay as they are.
        dequantize: Quantised weights become floats.
        requantize: As in ``load``, of GGUF; lossy, which config.json and the statistics of what is
            loaded from `out` say.
        dtype: ``float32``, ``bfloat16`` or ``float16`` of the floats; default: as they are.
        verify_written: Read everything back and compare hashes.
        gguf_file: Which of several GGUF models, as in ``load``.
        shard: ``i/N`` writes the trunk and the experts of rank i of N, 0 to N - 1, as `placement`
            of ``load(distributed=...)`` gives them (packed layout).
        progress: Called with (bytes done, bytes in all).
        mlx_path: The same as `out`, under mlx-lm's name.
        mtp: Write the head of multi-token prediction, if there is one (packed layout, without
            `shard`).

    Peak memory: one row chunk (64 MiB in float32, a few times) beside the interpreter.

    Raises:
        InputError, CheckpointError, MemoryBudgetError (the disk has no room), ExpertFileError.
    """
    use_mlx()
    if layout not in LAYOUTS:
        raise InputError(f"layout is {layout!r}; there are {', '.join(LAYOUTS)}.")
    if dtype is not None and dtype not in CODES:
        raise InputError(f"dtype is {dtype!r}; there are {', '.join(CODES)}.")
    if quantize and dequantize:
        raise InputError("give either quantize or dequantize, not both.")
    if requantize and dequantize:
        raise InputError("give either requantize or dequantize, not both.")
    if shard is not None and layout != "packed":
        raise InputError("shard needs the packed layout; leave out layout.")
    spec = QuantSpec.of_mode(q_mode, q_bits, q_group_size) if quantize else None
    if spec is not None and spec.block is not None:
        raise InputError(
            f"q_mode {q_mode!r} is read and not made; give affine or {', '.join(MX_MODES)}."
        )
    directory = resolve(path_or_hub_id, revision=revision, gguf_file=gguf_file)
    out = Path(out if mlx_path is None else mlx_path)
    checkpoint = open_checkpoint(directory, requantize=requantize, strict=strict_config)
    if out.exists() and out.resolve() == directory.resolve():
        raise InputError(f"{out} is the checkpoint itself; give another directory.")
    if checkpoint.held:
        raise InputError(f"{directory} has a part of the experts; convert the whole checkpoint.")
    conversion = Conversion(
        checkpoint,
        layout=layout,
        spec=spec,
        dequantize=dequantize,
        dtype=dtype,
        strict=strict_config,
        held=None if shard is None else shard_of(shard, placement),
        mtp=mtp,
    )
    lacking = conversion.kind.lacking_in_mlx_lm(conversion.config)
    if layout != "packed" and lacking is not None:
        sys.stderr.write(
            f"{out}: mlx-lm has no {lacking}; only mlx_moeflux loads this directory.\n"
        )
    identity = conversion.identity()
    with claim(out, identity, needed=conversion.total_bytes):
        write(conversion, out, identity, counted(progress, conversion.total_bytes))
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


TOKENIZER_FILES = """
    tokenizer.json tokenizer.model tokenizer_config.json special_tokens_map.json vocab.json
    chat_template.jinja chat_template.json generation_config.json merges.txt
""".split()  # noqa: SIM905 (a list would take a line for each name)


def write(conversion: Conversion, out: Path, identity: str, report: Report) -> None:
    """Write everything into `out`; config.json, which makes it a checkpoint, comes last.

    identity: Of what is converted and how; layers that an interrupted run of the same finished
    are kept (packed layout).

    Raises:
        CheckpointError, ExpertFileError: The disk is full or failed.
    """
    if conversion.layout == "packed":
        experts = _write_experts(conversion, out, identity, report)
        experts.finish(trunk=_write_tensors(conversion, out, report))
    else:
        _write_tensors(conversion, out, report)
    source = conversion.checkpoint.directory
    for name in TOKENIZER_FILES:
        if (source / name).exists():
            write_output(out / name, read_whole(source / name), error=CheckpointError)
    for name, content in conversion.checkpoint.tokenizer.items():
        write_json(out / name, content)
    write_json(out / CONFIG_NAME, conversion.config_json())


def _write_experts(
    conversion: Conversion, out: Path, identity: str, report: Report
) -> PackedWriter:
    """One blob a layer; the writer still has to be finished."""
    E = conversion.config.num_experts
    held = conversion.held or dict.fromkeys(conversion.experts, tuple(range(E)))
    count = len(next(iter(held.values())))
    writer = PackedWriter(
        out, count, identity, held=conversion.held, of=E if conversion.held else 0
    )
    for layer, recipes in conversion.experts.items():
        outputs = {p: recipe.outputs() for p, recipe in recipes.items()}
        components = [
            Component(f"{p}.{part}", t.dtype, t.shape)
            for p in PROJECTIONS
            for part, t in outputs[p].items()
        ]
        if writer.done(layer):
            report(count * sum(c.nbytes for c in components))
            continue
        with writer.layer(layer, components) as blob:
            for place, e in enumerate(held[layer]):
                for p in PROJECTIONS:
                    for part, position, data in conversion.expert_recipe(layer, p, e).chunks():
                        tensor = outputs[p][part]
                        row = position * tensor.shape[0] // tensor.nbytes
                        blob.write(place, f"{p}.{part}", row, data)
                        report(len(data))
    return writer


def _write_tensors(conversion: Conversion, out: Path, report: Report) -> list[str]:
    """The trunk as safetensors, and the experts too unless they are packed; the files' names."""
    pieces = list(_pieces(conversion))
    tensors: dict[str, Tensor] = {}
    for piece in pieces:
        tensors |= piece.tensors
    with SafetensorsWriter(out, tensors, metadata={"format": "mlx"}) as writer:
        for piece in pieces:
            for part, position, data in piece.recipe.chunks():
                writer.write(piece.names[part], piece.offsets[part] + position, data)
                report(len(data))
    return writer.files


@dataclass(frozen=True)
class _Piece:
    """A recipe, and for each part the tensor it goes into and the byte where it begins there.

    tensors: Those of the parts, by name.
    """

    recipe: Recipe
    names: dict[str, str]
    tensors: dict[str, Tensor]
    offsets: dict[str, int]


def _pieces(conversion: Conversion) -> Iterator[_Piece]:
    """The trunk and, unless they are packed, the experts: one tensor ``[E, ...]`` per component of
    a layer, one piece per expert."""
    for name, recipe in conversion.trunk.items():
        base, outputs = conversion.output_name(name).removesuffix(".weight"), recipe.outputs()
        names = {part: f"{base}.{part}" for part in outputs}
        if not name.endswith(".weight"):
            names = {"weight": base}
        tensors = {names[part]: tensor for part, tensor in outputs.items()}
        yield _Piece(recipe, names, tensors, dict.fromkeys(outputs, 0))
    E = conversion.config.num_experts
    for path, first in conversion.head_experts.items():
        recipe_of = partial(conversion.head_recipe, path)
        yield from _stack(path, first, recipe_of, conversion.head_count)
    if conversion.layout == "packed":
        return
    for layer, recipes in conversion.experts.items():
        for projection, first in recipes.items():
            path = f"model.layers.{layer}.mlp.switch_mlp.{projection}"
            recipe_of = partial(conversion.expert_recipe, layer, projection)
            yield from _stack(conversion.output_name(path), first, recipe_of, E)


def _stack(
    base: str, first: Recipe, recipe_of: Callable[[int], Recipe], count: int
) -> Iterator[_Piece]:
    """A tensor ``[E, ...]`` per component of a projection called `base`, one piece per expert."""
    outputs = first.outputs()
    names = {part: f"{base}.{part}" for part in outputs}
    tensors = {
        # Global scales are [E] in mlx-lm.
        names[part]: Tensor(t.dtype, (count, *t.shape) if part != GLOBAL_SCALE else (count,))
        for part, t in outputs.items()
    }
    for e in range(count):
        offsets = {part: e * t.nbytes for part, t in outputs.items()}
        yield _Piece(recipe_of(e), names, tensors, offsets)


MARKER_NAME = ".conversion.json"
LOCK_NAME = ".conversion.lock"
# What a conversion that died before its marker was written leaves behind.
_NOTHING_YET = {LOCK_NAME, MARKER_NAME + TEMPORARY_SUFFIX}


@contextmanager
def claim(out: Path, identity: str, *, needed: int) -> Iterator[None]:
    """Own `out` for the conversion `identity`, which writes `needed` bytes.

    The directory may be new, empty, or hold an unfinished conversion of the same identity. The
    system drops the lock when the process dies; the marker goes when the block ends well.

    Raises:
        InputError: The directory holds something else, cannot be written, or is being written.
        MemoryBudgetError: The disk has no room.
    """
    if out.exists() and not out.is_dir():
        raise InputError(f"{out} is a file; give a directory.")
    _check_content(out, identity)
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock = os.open(out / LOCK_NAME, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise unwritable(out, error) from error
    try:
        _lock(lock, out)
        try:
            # Once more: another conversion may have come and gone since the first look.
            if _check_content(out, identity):
                for leftover in out.glob("*.tmp"):
                    leftover.unlink()
            else:
                write_json(out / MARKER_NAME, {"identity": identity})
            _check_disk(out, needed)
            yield
            (out / MARKER_NAME).unlink(missing_ok=True)
        finally:
            (out / LOCK_NAME).unlink(missing_ok=True)
    finally:
        os.close(lock)


def _lock(lock: int, out: Path) -> None:
    busy = InputError(
        f"{out} is being written by another conversion; wait for it or give another directory."
    )
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise busy from None
    except OSError:
        # A file system without locks: the user must not run two conversions together.
        return
    try:
        present = os.stat(out / LOCK_NAME)
    except FileNotFoundError:
        raise busy from None
    if not os.path.samestat(present, os.fstat(lock)):
        # The owner removed the file that was opened here, and someone made the next.
        raise busy


def _check_content(out: Path, identity: str) -> bool:
    """Return True if an unfinished conversion of the same kind exists, False if nothing does."""
    marker = out / MARKER_NAME
    if not out.exists() or all(file.name in _NOTHING_YET for file in out.iterdir()):
        return False
    try:
        before = read_json_object(marker)["identity"]
    except (CheckpointError, KeyError):
        raise InputError(
            f"{out} is not empty and holds no unfinished conversion; give another directory."
        ) from None
    if before != identity:
        raise InputError(
            f"{out} holds an unfinished conversion of another checkpoint or with other "
            "options; remove it first."
        )
    return True


def _check_disk(out: Path, needed: int) -> None:
    present = sum(f.stat().st_size for f in out.rglob("*") if f.is_file())
    free = shutil.disk_usage(out).free
    if needed > free + present:
        raise MemoryBudgetError(
            f"{out} needs {needed} bytes ({needed / 1e9:.2f} GB) and has {free} free "
            f"({free / 1e9:.2f} GB); make room or choose another disk."
        )

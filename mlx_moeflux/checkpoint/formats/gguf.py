"""GGUF files: metadata as config.json, tensors under Hugging Face's names.

Experts keep the file's blocks, so that they stream as its byte ranges, or all become MLX's forms.
Matrices of the trunk become those, or floats (:mod:`mlx_moeflux.checkpoint.formats.gguf_blocks`),
unless the caller reads blocks there too. The family's record in
:mod:`mlx_moeflux.checkpoint.formats.gguf_architectures` says what names and metadata mean, and what
the converter did to values.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np

from mlx_moeflux.checkpoint.blocks import DECODED, BlockMode
from mlx_moeflux.checkpoint.files import size_of
from mlx_moeflux.checkpoint.formats.decoded import ColumnsRef, JoinedRef, MappedRef
from mlx_moeflux.checkpoint.formats.gguf_architectures import architecture_of
from mlx_moeflux.checkpoint.formats.gguf_blocks import (
    EXACT,
    GROUP,
    REQUANTISED,
    BlocksRef,
    BlockValuesRef,
    MlxForm,
)
from mlx_moeflux.checkpoint.formats.gguf_container import StoredTensor, read_container
from mlx_moeflux.checkpoint.formats.gguf_files import check_shards, shards
from mlx_moeflux.checkpoint.formats.gguf_header import Header
from mlx_moeflux.checkpoint.formats.gguf_metadata import Config
from mlx_moeflux.checkpoint.formats.gguf_names import IN_BLOCKS
from mlx_moeflux.checkpoint.formats.gguf_record import (
    EXPERTS,
    Architecture,
    Held,
    Order,
    Ranges,
    Target,
)
from mlx_moeflux.checkpoint.formats.gguf_tokenizer import end_ids
from mlx_moeflux.checkpoint.names import in_block_order
from mlx_moeflux.checkpoint.tensors import ExpertRefs, Ref, StackedRefs, TensorRef
from mlx_moeflux.errors import CheckpointError, ConfigError, UnsupportedError

PLAIN = ("F32", "F16", "BF16")


@dataclass
class GgufFile:
    """The content of a file or of all its shards.

    config: As config.json.
    tensors: The trunk.
    blocks: MoE layer id -> component -> references.
    metadata: Of the first shard, strings and numbers.
    decoded: Matrices of blocks that are read as floats: name -> type of block and elements.
    requantised: Names of tensors whose form of MLX's is not exact, with their type.
    prediction_bytes: Of the layers of multi-token prediction, which are left out.
    """

    path: Path
    config: dict[str, Any]
    tensors: dict[str, TensorRef]
    blocks: dict[int, dict[str, ExpertRefs]]
    metadata: dict[str, Any]
    decoded: dict[str, tuple[str, int]] = field(default_factory=dict)
    requantised: dict[str, str] = field(default_factory=dict)
    prediction_bytes: int = 0


def open_gguf(
    path: Path, *, requantize: bool = False, trunk_blocks: bool = False, strict: bool = True
) -> GgufFile:
    """Read the headers of `path` and of the shards beside it; no tensor.

    requantize: Blocks of experts become MLX's forms too, and those that have none are quantised
    anew.
    trunk_blocks: Otherwise matrices of the trunk keep their blocks too, where they can.
    strict: Metadata that nothing here reads are an error.

    Raises:
        CheckpointError: A file is damaged or missing, or a tensor is not the model's.
        UnsupportedError: Another architecture, or a type of block that is not decoded.
    """
    files = shards(path)
    containers = [read_container(file) for file in files]
    check_shards(files, [container.metadata for container in containers])
    metadata = containers[0].metadata
    name = metadata.get("general.architecture")
    architecture = architecture_of(path, name)
    header = Header(path, str(name), metadata)
    config = architecture.config(header, strict=strict)
    found = GgufFile(path, {}, {}, {}, metadata)
    forms = _FORMS_OF_ALL if requantize else _FORMS
    taken: _Taken = {}
    # Layers of multi-token prediction follow the others.
    predicted = range(config["num_hidden_layers"], header.number("block_count"))
    for file, container in zip(files, containers, strict=True):
        size = size_of(file)
        for tensor in container.tensors:
            if tensor.offset + tensor.nbytes > size:
                raise CheckpointError(
                    f"{file}: '{tensor.name}' ends behind the file's {size} bytes; the file is "
                    "truncated, download it again."
                )
            _take(found, taken, tensor, file, architecture, predicted, forms)
    for name, sources in taken.items():
        blocks = trunk_blocks and not requantize and _stays(name, taken)
        found.tensors |= _made(name, sources, config, found, blocks=blocks)
    found.blocks = in_block_order(found.blocks)
    found.config = _finished(architecture, config, found, path)
    return found


def gguf_metadata(path: Path) -> dict[str, Any]:
    """All keys and values of a file's header."""
    return read_container(path).metadata


class _Stored(NamedTuple):
    """A tensor of a file. raw: Its numbers, or rows of its blocks. kind: None for numbers. form:
    MLX's that it takes, or None. shape: In elements."""

    raw: TensorRef
    kind: BlockMode | None
    form: MlxForm | None
    shape: tuple[int, ...]

    def wrong(self, what: str) -> CheckpointError:
        """Return an error that names the tensor and its shape."""
        return CheckpointError(
            f"{self.raw.file}: '{self.raw.name}' has shape {list(self.shape)}, {what}; download it "
            "again."
        )


_Taken = dict[str, dict[int, tuple[Target, _Stored]]]
"""Name of a parameter -> place -> what it is made of."""


class _Forms(NamedTuple):
    """The forms of MLX's that matrices take, by the name of their type."""

    trunk: Mapping[str, MlxForm]
    experts: Mapping[str, MlxForm]


_FORMS = _Forms(EXACT, {name: form for name, form in EXACT.items() if DECODED[name].of_mlx})
_FORMS_OF_ALL = _Forms(REQUANTISED, REQUANTISED)


def _take(
    found: GgufFile,
    taken: _Taken,
    tensor: StoredTensor,
    file: Path,
    architecture: Architecture,
    predicted: range,
    forms: _Forms,
) -> None:
    """Put one tensor of a file where it belongs."""
    match = re.fullmatch(r"(?:blk\.(\d{1,5})\.)?([\w.]+)", tensor.name)
    layer = None if match is None or match[1] is None else int(match[1])
    if layer is not None and layer in predicted:
        found.prediction_bytes += tensor.nbytes
        return
    name = "" if match is None else match[2]
    stem, _, suffix = name.rpartition(".")
    experts = EXPERTS.get(stem) if suffix in ("weight", "bias") and layer is not None else None
    targets = [] if experts is not None else architecture.targets(name)
    if not targets and experts is None:
        raise CheckpointError(
            f"{file}: the tensor '{tensor.name}' is none of {architecture.published}'s that are "
            "read here."
        )
    stored = _stored(tensor, file, forms.trunk if experts is None else forms.experts)
    if experts is not None:
        _take_experts(found, layer or 0, experts, suffix, stored)
        return
    prefix = "" if layer is None else f"model.layers.{layer}."
    for target in targets:
        places = taken.setdefault(f"{prefix}{target.name}", {})
        if target.place in places:
            other = places[target.place][1].raw.name
            raise CheckpointError(
                f"{file}: '{tensor.name}' and '{other}' are both '{prefix}{target.name}'; "
                "download the file again."
            )
        places[target.place] = target, stored


def _stored(tensor: StoredTensor, file: Path, forms: Mapping[str, MlxForm]) -> _Stored:
    """Return the place, type and shape of one tensor."""
    kind, shape = tensor.kind, tensor.shape
    if not isinstance(kind, BlockMode):
        if kind.name not in PLAIN:
            raise UnsupportedError(
                f"{file}: '{tensor.name}' is {kind.name}; only {', '.join([*DECODED, *PLAIN])} are "
                "decoded."
            )
        raw = TensorRef(tensor.name, file, tensor.offset, kind.name, shape)
        return _Stored(raw, None, None, shape)
    rows = (*shape[:-1], shape[-1] // kind.elements * kind.nbytes) if shape else ()
    dtype = "U8" if kind.of_mlx else kind.mode
    raw = TensorRef(tensor.name, file, tensor.offset, dtype, rows)
    stored = _Stored(raw, kind, forms.get(kind.name), shape)
    if len(shape) < 2:
        raise stored.wrong("no matrix's")
    return stored


def _take_experts(
    found: GgufFile, layer: int, projections: tuple[str, ...], suffix: str, stored: _Stored
) -> None:
    """Put a stack of experts, whose rows the projections share, into the layer."""
    raw, kind, form = stored.raw, stored.kind, stored.form
    axes = 3 if suffix == "weight" else 2
    if len(raw.shape) != axes or not raw.shape[0] or raw.shape[1] % len(projections):
        raise stored.wrong(f"not {axes} axes with the rows of {' and '.join(projections)}")
    if kind is not None and suffix == "bias":
        raise UnsupportedError(f"{raw.file}: '{raw.name}' is {kind.name}; biases are numbers.")
    components = found.blocks.setdefault(layer, {})
    rows = raw.shape[1] // len(projections)
    for i, projection in enumerate(projections):
        window = (i * rows, (i + 1) * rows) if len(projections) > 1 else None
        stack: ExpertRefs = StackedRefs(raw, window)
        made: dict[str, ExpertRefs] = {suffix: stack}
        if kind is not None and form is not None:
            _note(found, stored)
            each = [BlocksRef.parts(raw.name, ref, kind, form) for ref in stack]
            made = {part: tuple(parts[part] for parts in each) for part in form.spec.parts}
        for part, refs in made.items():
            name = f"{projection}.{part}"
            if name in components:
                raise CheckpointError(
                    f"{raw.file}: layer {layer} has '{name}' of its experts twice, once in "
                    f"'{raw.name}'; download the file again."
                )
            components[name] = refs


def _note(found: GgufFile, stored: _Stored) -> None:
    """Remember a matrix that is quantised anew, if it is."""
    if stored.kind is not None and stored.form is not None and not stored.form.exact:
        found.requantised[stored.raw.name] = stored.kind.name


def _stays(name: str, taken: Collection[str]) -> bool:
    """Return True if a parameter may stay in blocks: the module is a matrix and nothing else."""
    path, _, part = name.rpartition(".")
    own = re.sub(r"^model\.layers\.\d+\.", "", path)
    return part == "weight" and own in IN_BLOCKS and f"{path}.bias" not in taken


def _made(
    name: str,
    places: Mapping[int, tuple[Target, _Stored]],
    config: Config,
    found: GgufFile,
    *,
    blocks: bool,
) -> dict[str, TensorRef]:
    """Return one parameter, or the parts of a quantised one, by name. blocks: See
    :func:`_parts`."""
    sources = [places[place] for place in sorted(places)]
    target, stored = sources[0]
    if target.table is not None:
        table = target.table(config, stored.shape[0])
        if table is None:
            raise stored.wrong("but the metadata name no layer that reads it")
        layer, keys = table
        config |= keys
        name = name.format(layer=layer)
    kinds = {(stored.kind, stored.raw.dtype) for _, stored in sources}
    if any(other.shape[1:] != stored.shape[1:] for _, other in sources):
        raise stored.wrong("and what belongs to it has other rows")
    # Of different types there is no quantised form together.
    floats = len(kinds) > 1
    parts = [_parts(*source, config, floats=floats, blocks=blocks) for source in sources]
    for _, each in sources:
        if len(parts[0]) > 1:
            _note(found, each)
        elif each.kind is not None and not target.table and parts[0]["weight"].dtype in PLAIN:
            found.decoded[each.raw.name] = each.kind.name, prod(each.shape)
    made: dict[str, Ref] = {}
    for part in parts[0]:
        refs = [each[part] for each in parts]
        whole = f"{name.removesuffix('.weight')}.{part}" if len(parts[0]) > 1 else name
        made[whole] = refs[0] if len(refs) == 1 else JoinedRef(whole, refs)
    # Readers ask for what both kinds of reference have.
    return cast("dict[str, TensorRef]", made)


def _parts(
    target: Target, stored: _Stored, config: Config, *, floats: bool, blocks: bool
) -> dict[str, Ref]:
    """Return part -> reference of what one tensor of the file gives, one part if it is not
    quantised, or in blocks. floats: In float32. blocks: As it is, if its columns stay where they
    are."""
    raw, kind, form = stored.raw, stored.kind, stored.form
    columns = _order(target.columns, config, stored, axis=-1)
    width = columns[0][1] - columns[0][0] if columns else GROUP
    ref: Ref = raw
    quantised = not (floats or target.values or width % GROUP)
    if blocks and kind is not None and not kind.of_mlx and quantised and not columns:
        parts: dict[str, Ref] = {"weight": raw}
    elif kind is not None and form is not None and quantised:
        parts = {**BlocksRef.parts(raw.name, raw, kind, form)}
    else:
        if kind is not None:
            ref = BlockValuesRef(raw.name, raw, kind=kind)
            if target.values is not None:
                raise stored.wrong(f"and is {kind.name} where numbers are")
        elif target.values is not None:
            ref = MappedRef(raw.name, raw, target.values)
        elif floats and raw.dtype != "F32":
            ref = MappedRef(raw.name, raw, np.positive)
        elif target.row and len(raw.shape) == 1:
            ref = replace(raw, shape=(1, *raw.shape))
        parts = {"weight": ref}
    if rows := _order(target.rows, config, stored, axis=0):
        parts = {
            part: JoinedRef(ref.name, [ref.rows(*some) for some in rows])
            for part, ref in parts.items()
        }
    if columns:
        order = [start // width for start, _ in columns]
        parts = {part: ColumnsRef(ref.name, ref, order) for part, ref in parts.items()}
    return parts


def _order(order: Order | None, config: Config, stored: _Stored, *, axis: int) -> Ranges:
    """Return the ranges of a tensor's rows or columns in our order; none if all stay where they
    are.

    Raises:
        CheckpointError: The sizes of the metadata do not fit the tensor.
    """
    if order is None:
        return []
    count = stored.shape[axis] if len(stored.shape) >= (2 if axis else 1) else 0
    try:
        ranges = order(config, count)
    except (TypeError, OverflowError):
        ranges = []
    if not ranges or not all(0 <= start <= stop <= count for start, stop in ranges):
        raise stored.wrong("which does not fit the heads of the metadata")
    return [] if ranges == sorted(ranges) and ranges[-1][1] == count == _total(ranges) else ranges


def _total(ranges: Iterable[tuple[int, int]]) -> int:
    return sum(stop - start for start, stop in ranges)


def _finished(
    architecture: Architecture, config: Config, found: GgufFile, path: Path
) -> dict[str, Any]:
    """Return config.json, with what the tensors say."""
    layers, tensors = config["num_hidden_layers"], len(found.tensors)
    if layers > tensors:
        raise ConfigError(
            f"{path}: 'block_count' of the metadata makes {layers} layers, but the file has "
            f"{tensors} tensors besides experts; download it again."
        )
    if "model.embed_tokens.weight" not in found.tensors:
        raise CheckpointError(f"{path} has no tensor 'token_embd.weight'.")
    config = config | {"vocab_size": found.tensors["model.embed_tokens.weight"].shape[0]}
    held = Held(path, config, found.tensors, found.blocks)
    config = config | {key: said(held) for key, said in architecture.stored.items()}
    whole = {
        "model_type": architecture.model_type,
        "architectures": [architecture.published],
        "tie_word_embeddings": "lm_head.weight" not in found.tensors,
        "eos_token_id": end_ids(found.metadata),
    }
    return whole | {"text_config": config} if architecture.wrapped else config | whole

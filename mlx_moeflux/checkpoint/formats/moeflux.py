"""Directories of moeflux and flash-moe: one weight file with a manifest, one blob per layer.

``model_weights.bin`` holds the trunk, ``model_weights.json`` says where each tensor lies.
``packed_experts/layer_NN.bin`` (4-bit) or ``packed_experts_2bit/layer_NN.bin`` holds E blocks
one after the other, without header or padding: gate, up and down projection, each as weight,
scales and biases. config.json and the tokenizer lie beside them.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from math import prod
from pathlib import Path

from mlx_moeflux.checkpoint.files import read_json_object, size_of, unreadable
from mlx_moeflux.checkpoint.names import PROJECTIONS
from mlx_moeflux.checkpoint.quantization import DEFAULT_GROUP_SIZE, Quantization, QuantSpec
from mlx_moeflux.checkpoint.tensors import ITEMSIZE, Blocks, TensorRef, block_refs, check_layer
from mlx_moeflux.checks import is_natural, is_positive, is_shape
from mlx_moeflux.errors import CheckpointError, ExpertFileError, ShapeError, UnsupportedError

MANIFEST_NAME = "model_weights.json"
WEIGHTS_NAME = "model_weights.bin"
EXPERT_DIRECTORIES = {4: "packed_experts", 2: "packed_experts_2bit"}
"""Where the blocks of each bit width lie."""

_DTYPES = ("U32", "BF16", "F32")
_LAYER_FILE = re.compile(r"layer_(\d{2,9})\.bin")


@dataclass(frozen=True, slots=True)
class MoefluxDirectory:
    """The parts of a moeflux checkpoint; made by :meth:`find`.

    ``root`` has config.json and the tokenizer, ``weights`` the manifest and the trunk, and
    ``experts`` the layer files of ``bits`` bits.
    """

    root: Path
    weights: Path
    experts: Path
    bits: int

    @classmethod
    def find(cls, directory: str | os.PathLike[str]) -> MoefluxDirectory | None:
        """The parts of a checkpoint whose manifest is in ``directory`` or in an ``artifacts``
        folder inside or beside it; None if there is no manifest.

        Experts of 4 bits come before those of 2. Raises CheckpointError if there are none.
        """
        directory = Path(directory)
        beside = directory.absolute().parent
        places = (directory, directory / "artifacts", beside / "artifacts")
        weights = next((p for p in places if (p / MANIFEST_NAME).is_file()), None)
        if weights is None:
            return None
        for bits, name in EXPERT_DIRECTORIES.items():
            for place in dict.fromkeys((weights, directory, beside)):
                experts = place / name
                if experts.is_dir():
                    return cls(directory, weights, experts, bits)
        names = " or ".join(EXPERT_DIRECTORIES.values())
        raise CheckpointError(
            f"{directory} has {MANIFEST_NAME}, but no directory {names} beside it; put the layer"
            " files there."
        )


class MoefluxTrunk(dict[str, TensorRef]):
    """The tensors of ``model_weights.bin`` by name; made by :meth:`open`.

    ``quantization`` has one entry for every quantised module and no default: bits from the
    manifest, group size from the shapes.
    """

    quantization: Quantization

    @classmethod
    def open(cls, directory: str | os.PathLike[str]) -> MoefluxTrunk:
        """Read ``model_weights.json`` of a directory and check it against ``model_weights.bin``.

        Raises CheckpointError if a file is missing or an entry is malformed or out of bounds.
        """
        manifest, weights = Path(directory) / MANIFEST_NAME, Path(directory) / WEIGHTS_NAME
        content = read_json_object(manifest)
        size = size_of(weights)
        tensors = content.get("tensors")
        if not isinstance(tensors, dict) or not tensors:
            raise CheckpointError(f"{manifest} has no object of tensors; extract it again.")
        trunk = cls(
            (name, _tensor(name, entry, manifest=manifest, weights=weights, size=size))
            for name, entry in tensors.items()
        )
        config = content.get("config")
        group = config.get("default_group_size") if isinstance(config, dict) else None
        specs = {}
        for name, ref in trunk.items():
            if ref.dtype == "U32":
                path = name.removesuffix(".weight")
                stated = tensors[name].get("bits")
                specs[path] = _spec(path, trunk, stated=stated, group=group, manifest=manifest)
        trunk.quantization = Quantization(None, specs)
        return trunk


@dataclass(frozen=True, slots=True, kw_only=True)
class MoefluxExperts:
    """The layer files of a ``packed_experts`` directory, checked by size; made by :meth:`open`."""

    directory: Path
    layers: tuple[int, ...]
    num_experts: int
    components: dict[str, tuple[str, tuple[int, ...]]]

    @classmethod
    def open(
        cls,
        directory: str | os.PathLike[str],
        *,
        hidden: int,
        intermediate: int,
        num_experts: int,
        spec: QuantSpec,
    ) -> MoefluxExperts:
        """Check that every layer file is there and has exactly E blocks.

        ``hidden`` is C, ``intermediate`` F. The layers are those between the first and the last
        file. The block follows from C, F and ``spec``, never from a stored table. Raises
        ExpertFileError naming the file that is missing or has another size, ShapeError if the
        widths do not divide into groups.
        """
        directory = Path(directory)
        components = block_components(hidden, intermediate, spec)
        try:
            matches = [_LAYER_FILE.fullmatch(name) for name in os.listdir(directory)]
        except OSError as cause:
            raise unreadable(directory, cause, error=ExpertFileError) from cause
        found = sorted(int(match[1]) for match in matches if match)
        if not found:
            raise ExpertFileError(f"{directory} holds no layer_NN.bin; put the layer files there.")
        wanted = range(found[0], found[-1] + 1)
        experts = cls(
            directory=directory, layers=tuple(found), num_experts=num_experts, components=components
        )
        block = experts.block_bytes
        for layer in wanted:
            file = experts.file(layer)
            missing = (
                f"{file} is missing: the layers {wanted[0]} to {wanted[-1]} need a file each;"
                " copy or pack it again."
            )
            size = size_of(file, error=ExpertFileError, missing=missing)
            if size != num_experts * block:
                raise ExpertFileError(
                    f"{file} has {size} bytes, but {num_experts} experts of {block} bytes"
                    f" ({spec.bits}-bit, widths {hidden} and {intermediate}) make"
                    f" {num_experts * block}; copy it again, or correct config.json."
                )
        return experts

    @property
    def block_bytes(self) -> int:
        """Bytes of one expert; blocks follow each other without padding."""
        return sum(prod(shape) * ITEMSIZE[dtype] for dtype, shape in self.components.values())

    def file(self, layer: int) -> Path:
        """The layer's file."""
        return self.directory / f"layer_{layer:02d}.bin"

    def refs(self, layer: int) -> Blocks:
        """Component name -> the experts' byte ranges, in the order of the block."""
        check_layer(layer, self.layers, self.directory)
        return block_refs(
            self.file(layer),
            layer,
            self.components,
            stride=self.block_bytes,
            num_experts=self.num_experts,
        )


def block_components(
    hidden: int, intermediate: int, spec: QuantSpec
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Component name -> (dtype, shape) of one block, in order, for widths C and F.

    Raises ShapeError if a width does not divide into groups.
    """
    components: dict[str, tuple[str, tuple[int, ...]]] = {}
    for projection in PROJECTIONS:
        rows, width = intermediate, hidden
        if projection == "down_proj":
            rows, width = hidden, intermediate
        groups = (rows, spec.groups(width))
        components[f"{projection}.weight"] = ("U32", (rows, spec.words(width)))
        components[f"{projection}.scales"] = ("BF16", groups)
        components[f"{projection}.biases"] = ("BF16", groups)
    return components


def _tensor(name: str, entry: object, *, manifest: Path, weights: Path, size: int) -> TensorRef:
    if not isinstance(entry, dict):
        raise _bad(manifest, name, f"is described by {entry!r}, not by an object")
    dtype, shape, offset, nbytes = (entry.get(key) for key in ("dtype", "shape", "offset", "size"))
    if dtype not in _DTYPES:
        raise _bad(manifest, name, f"has dtype {dtype!r}, not one of {', '.join(_DTYPES)}")
    if not is_shape(shape):
        raise _bad(manifest, name, f"has shape {shape!r}, not a list of sizes")
    if not is_natural(offset) or not is_natural(nbytes):
        raise _bad(manifest, name, f"has offset {offset!r} and size {nbytes!r}, not two sizes")
    ref = TensorRef(name, weights, offset, dtype, tuple(shape))
    if nbytes != ref.nbytes:
        raise _bad(manifest, name, f"has {nbytes} bytes, but {dtype} {shape} takes {ref.nbytes}")
    if offset + nbytes > size:
        raise CheckpointError(
            f"Tensor {name!r} of {manifest} ends at byte {offset + nbytes}, but {weights.name}"
            f" has {size} bytes; it is truncated or another model's, copy it again."
        )
    return ref


def _spec(
    path: str, refs: dict[str, TensorRef], *, stated: object, group: object, manifest: Path
) -> QuantSpec:
    """Bits and group size of one module; what the manifest leaves out follows from the shapes."""
    weight, scales, biases = (refs.get(f"{path}.{part}") for part in ("weight", "scales", "biases"))
    if weight is None or scales is None or biases is None:
        raise _bad(manifest, path, "is quantised (U32), but weight, scales or biases are missing")
    if len(weight.shape) < 2 or scales.shape != biases.shape or not prod(scales.shape):
        raise _bad(manifest, path, "has shapes that no quantised weight has")
    words, groups = weight.shape[-1], scales.shape[-1]
    if stated is None:
        width = groups * (group if is_positive(group) else DEFAULT_GROUP_SIZE)
        bits = words * 32 // width
    elif is_positive(stated) and stated <= 32:
        bits, width = stated, words * 32 // stated
    else:
        raise _bad(manifest, path, f"has bits {stated!r}")
    try:
        spec = QuantSpec(bits, width // groups)
        fits = (spec.words(width), spec.groups(width)) == (words, groups)
    except (UnsupportedError, ShapeError):
        fits = False
    if not fits or scales.shape[:-1] != weight.shape[:-1]:
        shapes = f"weight {list(weight.shape)} and scales {list(scales.shape)}"
        raise _bad(manifest, path, f"has {bits} bits, {shapes}, which is no quantisation of MLX")
    return spec


def _bad(manifest: Path, name: str, fault: str) -> CheckpointError:
    return CheckpointError(f"Tensor {name!r} of {manifest} {fault}; extract the weights again.")

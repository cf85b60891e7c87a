"""Load checkpoint tensors into a model: trunk parameters and resident experts.

An unused tensor and a parameter without a tensor are errors that list the names.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten
from tqdm import tqdm

from mlx_moeflux.checkpoint.blocks import BLOCK_MODES
from mlx_moeflux.checkpoint.load import check_stacks, load_all, load_groups, stacks_of
from mlx_moeflux.checkpoint.names import (
    GLOBAL_SCALE,
    PARTS,
    PROJECTIONS,
    MappedTensors,
    NameRules,
    Transform,
)
from mlx_moeflux.checkpoint.quantization import GROUP_SIZES, MODES, QuantSpec
from mlx_moeflux.checkpoint.source import Checkpoint
from mlx_moeflux.checkpoint.tensors import ExpertRefs, TensorRef, naming_absent
from mlx_moeflux.errors import CheckpointError, MoefluxError
from mlx_moeflux.experts.io.layout import BlockLayout
from mlx_moeflux.experts.io.samples import Watch
from mlx_moeflux.kernels.linear.quantised import scaled, settings
from mlx_moeflux.kernels.moe.expert_ffn import Activation, ExpertBank
from mlx_moeflux.kernels.runtime import device
from mlx_moeflux.models.decoder import DecoderModel
from mlx_moeflux.models.layers import BlocksLinear, ScaledLinear
from mlx_moeflux.models.moe import ExpertProjection, SparseMoeBlock, SwitchGLU
from mlx_moeflux.models.mtp import PredictionHead
from mlx_moeflux.models.packed_parameters import is_packed, pack
from mlx_moeflux.models.protocol import named_parameters

FLOATS = ("F32", "BF16", "F16")
# Names of what a quantised matrix is stored as.
_STORED = (*PARTS, GLOBAL_SCALE)
M = TypeVar("M", bound=nn.Module)


def default_dtype() -> mx.Dtype:
    """Return bfloat16 on GPUs, float32 on the CPU, where bfloat16 is slower."""
    return mx.float32 if device.kind() == "cpu" else mx.bfloat16


@dataclass(frozen=True)
class Matched:
    """Tensors that fit the parameters of a model, or of a head.

    trunk: Parameter's name -> tensor. transforms: Name -> what is applied to it after reading.
    specs: Path of a module -> how its matrix is stored; those of `dense` become floats when they
    are read, because the module computes in floats alone.
    """

    trunk: Mapping[str, TensorRef]
    transforms: Mapping[str, Transform]
    specs: Mapping[str, QuantSpec]
    dense: Set[str]


def match_trunk(model: DecoderModel, mapped: MappedTensors, *, directory: Path) -> Matched:
    """Quantise the modules of `model` as in the checkpoint and compare names and shapes; no data is
    read.

    Raises:
        CheckpointError: Names or shapes do not fit.
    """
    trunk = dict(mapped.trunk)
    if model.config.tie_word_embeddings:
        # Some exporters also write the tied head.
        trunk = {n: t for n, t in trunk.items() if not n.startswith("lm_head.")}
    model.fit_names(trunk)
    transforms = model.transforms(trunk)
    check_layers(model, trunk, directory)
    try:
        return _match(model, trunk, transforms, directory)
    except CheckpointError as error:
        raise naming_absent(error, mapped.absent) from error


def _match(
    module: nn.Module,
    trunk: Mapping[str, TensorRef],
    transforms: Mapping[str, Transform],
    directory: Path,
) -> Matched:
    """Quantise the parts of `module` as in `trunk`, and compare names, dtypes and shapes.

    Raises:
        CheckpointError: See :func:`match_trunk`.
    """
    specs, dense = _quantise_modules(module, trunk)
    in_blocks = _keep_blocks(module, trunk)
    parameters = dict(named_parameters(module))
    plain = {name: ref for name, ref in trunk.items() if not _is_part(name, dense)}
    _check_names(plain.keys() | {f"{path}.weight" for path in dense}, parameters.keys(), directory)
    for name, ref in plain.items():
        allowed = (ref.dtype,) if name in in_blocks else _dtypes(parameters[name].dtype)
        if ref.dtype not in allowed:
            raise CheckpointError(
                f"{ref.file}: '{ref.name}' is {ref.dtype}, but must be {' or '.join(allowed)}; the "
                "header is damaged or of another model, download the file again."
            )
        expected = tuple(parameters[name].shape)
        if name not in transforms and ref.shape != expected:
            raise _wrong_shape(ref, ref.shape, expected)
    return Matched(trunk, transforms, specs, dense)


def fill_trunk(
    model: DecoderModel, mapped: MappedTensors, *, directory: Path, dtype: mx.Dtype
) -> Mapping[str, QuantSpec]:
    """Load every trunk tensor into `model`, floats in `dtype`; evaluated. Returns path of a
    module -> how its matrix is stored.

    Raises:
        CheckpointError: As in :func:`match_trunk`, or a tensor cannot be read.
    """
    matched = match_trunk(model, mapped, directory=directory)
    _fill(model, matched, dtype, model.keeps_float32)
    return matched.specs


def match_head(
    head: PredictionHead, mapped: MappedTensors, *, directory: Path
) -> tuple[Matched, BlockLayout]:
    """Do what :func:`match_trunk` does for a head of multi-token prediction. Returns also the
    layout of its experts' blocks.

    Raises:
        CheckpointError: Names, shapes or experts do not fit.
    """
    try:
        head.body.fit_names(mapped.trunk)
        transforms = head.transforms(mapped)
        layouts = check_experts(head.body, mapped, directory=directory)
        return _match(head, mapped.trunk, transforms, directory), layouts[0]
    except CheckpointError as error:
        raise CheckpointError(f"the head of multi-token prediction: {error}") from error


def fill_head(
    head: PredictionHead, mapped: MappedTensors, *, directory: Path, dtype: mx.Dtype
) -> BlockLayout:
    """Load the trunk of a head, floats in `dtype`; evaluated. Returns its experts' layout.

    Raises:
        CheckpointError: As in :func:`match_head`, or a tensor cannot be read.
    """
    matched, layout = match_head(head, mapped, directory=directory)
    _fill(head, matched, dtype, head.body.keeps_float32)
    return layout


def _fill(
    module: nn.Module, matched: Matched, dtype: mx.Dtype, keeps_float32: Callable[[str], bool]
) -> None:
    """Load what :func:`_match` has compared into `module`; evaluated."""
    parameters = dict(named_parameters(module))
    written, transforms = [], matched.transforms
    for name, ref, array in _loaded(matched):
        expected = tuple(parameters[name].shape)
        if name in transforms:
            array = transforms[name](array)
        if array.shape != expected:
            raise _wrong_shape(ref, array.shape, expected)
        if mx.issubdtype(array.dtype, mx.floating) and not name.endswith(f".{GLOBAL_SCALE}"):
            array = array.astype(mx.float32 if keeps_float32(name) else dtype)
        if _is_never_zeros(name, array):
            written.append((ref, array.any()))
        mx.eval(array)
        owner, _, leaf = name.rpartition(".")
        _module_at(module, owner)[leaf] = array
    _check_written(written)
    module.eval()


def _loaded(matched: Matched) -> Iterator[tuple[str, TensorRef, mx.array]]:
    """Yield each parameter's name, its tensor, and what that holds, of a matrix that is computed
    in floats its numbers in float32."""
    trunk = matched.trunk
    plain = {name: ref for name, ref in trunk.items() if not _is_part(name, matched.dense)}
    for (name, ref), array in zip(plain.items(), load_all(plain.values()), strict=True):
        yield name, ref, array
    for path in matched.dense:
        parts = {part: trunk[f"{path}.{part}"] for part in _STORED if f"{path}.{part}" in trunk}
        arrays = {part: ref.load() for part, ref in parts.items()}
        yield f"{path}.weight", parts["weight"], _numbers(matched.specs[path], **arrays)


def _is_part(name: str, modules: Set[str]) -> bool:
    """Return True if a tensor is a part of the quantised matrix of one of `modules`, whose other
    parameters are as they are."""
    path, _, part = name.rpartition(".")
    return path in modules and part in _STORED


def _numbers(
    spec: QuantSpec,
    weight: mx.array,
    scales: mx.array,
    biases: mx.array | None = None,
    global_scale: mx.array | None = None,
) -> mx.array:
    """Return the numbers of a quantised matrix in float32."""
    if spec.is_affine and biases is not None:
        scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
    numbers = mx.dequantize(weight, scales, biases, **settings(spec)).astype(mx.float32)
    return numbers if global_scale is None else scaled(numbers, global_scale, mx.float32)


def _dtypes(parameter: mx.Dtype) -> tuple[str, ...]:
    """Return the stored dtypes of a parameter: floats, or the packed words or bytes of a
    quantisation."""
    if parameter == mx.uint32:
        return ("U32",)
    return ("U8",) if parameter == mx.uint8 else FLOATS


def _is_never_zeros(name: str, array: mx.array) -> bool:
    """Whether no model has zeros alone there: norms, and scales in floats. Scales in bytes are
    zeros where NVFP4 stores a matrix of zeros."""
    return name.endswith(("norm.weight", ".scales")) and array.dtype != mx.uint8


def _check_written(written: list[tuple[TensorRef, mx.array]]) -> None:
    """Raise CheckpointError for a tensor without any value but zero: space was reserved for the
    file, or it was cut off and filled up. A GPU is asked once for all of them."""
    mx.eval([any_value for _, any_value in written])
    for ref, any_value in written:
        if not any_value.item():
            raise CheckpointError(
                f"{ref.file} has zeros as '{ref.name}'; it was not written completely: copy, "
                "download or convert it again."
            )


def _module_at(model: nn.Module, path: str):
    module = model
    for part in filter(None, path.split(".")):
        module = module[int(part)] if part.isdigit() else module[part]
    return module


def _wrong_shape(ref: TensorRef, shape, expected) -> CheckpointError:
    return CheckpointError(
        f"{ref.file}: '{ref.name}' has shape {list(shape)}, the config requires {list(expected)}; "
        "config.json and the weights are of different models."
    )


def check_layers(model: DecoderModel, found: Iterable[str], directory: Path) -> None:
    """Compare the number of layers in a checkpoint's tensor names with the model's.

    Raises:
        CheckpointError: They differ.
    """
    layers = [int(m[1]) for n in found if (m := re.match(r"model\.layers\.(\d{1,9})\.", n))]
    if not layers:
        raise CheckpointError(f"{directory}: no tensor is named 'model.layers.N...'.")
    if max(layers) + 1 != len(model.layers):
        raise CheckpointError(
            f"{directory}: the weights have {max(layers) + 1} layers, config.json says "
            f"{len(model.layers)}; they are of different models."
        )


def check_experts(
    model: DecoderModel, mapped: MappedTensors, *, directory: Path, of: int = 0
) -> dict[int, BlockLayout]:
    """Return the block layout of every MoE layer.

    of: Number of experts of the whole model, where `mapped` has a part of them; else 0.

    Raises:
        CheckpointError: Layers, number of experts or widths differ from the config's.
    """
    try:
        check_layers(model, mapped.trunk, directory)
        return _layouts(model, mapped, directory, of)
    except CheckpointError as error:
        raise naming_absent(error, mapped.absent) from error


def _layouts(
    model: DecoderModel, mapped: MappedTensors, directory: Path, of: int
) -> dict[int, BlockLayout]:
    expected, found = set(model.moe_blocks()), set(mapped.experts)
    if expected != found:
        layer = min(expected ^ found)
        what = "are missing" if layer in expected else "are there although it has no MoE block"
        raise CheckpointError(
            f"{directory}: the experts of layer {layer} {what}; config.json and the weights are of "
            "different models, or a file was not fetched."
        )
    C, F = model.config.hidden_size, model.config.moe_intermediate_size
    layouts = {}
    for layer, components in mapped.experts.items():
        layouts[layer] = layout = BlockLayout.of(components)
        for name, refs in components.items():
            if (of or len(refs)) != model.config.num_experts:
                raise CheckpointError(
                    f"{refs[0].file}: layer {layer} has {len(refs)} experts in '{name}', "
                    f"config.json says {model.config.num_experts}."
                )
        if (layout.hidden, layout.intermediate) != (C, F):
            raise CheckpointError(
                f"{directory}: the experts of layer {layer} are {layout.hidden} wide and "
                f"{layout.intermediate} inside, config.json says {C} and {F}."
            )
    return layouts


def expert_specs(layouts: Mapping[int, BlockLayout]) -> dict[str, QuantSpec | None]:
    """Return path of each projection of experts -> how it is stored, as `layouts` have them by
    layer."""
    return {
        f"model.layers.{layer}.mlp.switch_mlp.{projection}": spec
        for layer, layout in layouts.items()
        for projection, spec in layout.specs.items()
    }


def _check_names(found: Set[str], expected: Set[str], directory: Path) -> None:
    for names, what in (
        (expected - found, "lacks the tensors"),
        (found - expected, "has tensors that the model does not know"),
    ):
        if names:
            first = ", ".join(sorted(names)[:4])
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            raise CheckpointError(f"{directory} {what}: {first}{more}.")


def _quantise_modules(
    model: nn.Module, trunk: Mapping[str, TensorRef]
) -> tuple[dict[str, QuantSpec], set[str]]:
    """Quantise each module whose tensors are quantised; bits and groups follow from their shapes.
    Returns path -> how its matrix is stored, and the paths of modules that compute in floats, which
    are left as they are.

    Raises:
        CheckpointError: Shapes fit no supported quantisation, or not each other.
    """
    specs: dict[str, QuantSpec] = {}
    dense: set[str] = set()
    modules = dict(model.named_modules())
    for name, scales in trunk.items():
        path, _, leaf = name.rpartition(".")
        weight, module = trunk.get(f"{path}.weight"), modules.get(path)
        if leaf != "scales" or weight is None or module is None or "weight" not in module:
            continue
        shape = module.weight.shape
        one, biases = f"{path}.{GLOBAL_SCALE}" in trunk, trunk.get(f"{path}.biases")
        specs[path] = spec = infer_spec(weight, scales, shape[-1], global_scale=one)
        if hasattr(module, "to_quantized"):
            continue
        dense.add(path)
        if weight.shape[:-1] != shape[:-1]:
            raise _wrong_shape(weight, weight.shape, (*shape[:-1], weight.shape[-1]))
        groups = (*shape[:-1], spec.groups(shape[-1]))
        for part in (scales, biases) if spec.is_affine else (scales,):
            if part is None or part.shape != groups:
                found = "is missing" if part is None else f"has shape {list(part.shape)}"
                raise CheckpointError(
                    f"{weight.file}: '{weight.name}' is quantised, but one of its scales and "
                    f"biases, which must be {list(groups)}, {found}; download the file again."
                )
    quantised = specs.keys() - dense
    if quantised:
        nn.quantize(
            model,
            class_predicate=lambda path, _: settings(specs[path]) if path in quantised else False,
        )
    modules = dict(model.named_modules())
    for path in quantised:
        if specs[path].global_scale and isinstance(modules[path], nn.QuantizedLinear):
            model.update_modules(tree_unflatten([(path, ScaledLinear.of(modules[path]))]))
    return specs, dense


def compare_with_config(
    checkpoint: Checkpoint, rules: NameRules, stored: Mapping[str, QuantSpec | None]
) -> None:
    """Warn in one line where config.json says other bits, groups or modes than those in which
    matrices are stored, which are used. Of a matrix that is stored in floats it may say anything.

    stored: Path of a module, or of a projection of experts, -> how its matrix is stored.

    Raises:
        CheckpointError: A global scale that config.json announces is not there: without it all
            numbers of the matrix would be others.
    """
    hints = checkpoint.quantization.renamed(rules.module)
    different = []
    for path, spec in stored.items():
        declared = hints.spec(path)
        if spec is None or (declared is None and path not in hints.overrides):
            continue
        if declared is not None and spec.mode == declared.mode and MODES[spec.mode].global_scale:
            if declared.global_scale > spec.global_scale:
                raise CheckpointError(
                    f"{checkpoint.directory}: config.json says that '{path}' has a global_scale, "
                    "but there is none; fetch the shard that holds it."
                )
        elif declared != spec:
            different.append(path)
    if different:
        first, others = different[0], len(different) - 1
        warnings.warn(
            f"{checkpoint.config_file}: 'quantization' says {_describe(hints.spec(first))} of "
            f"'{first}', which is stored in {_describe(stored[first])}"
            f"{f', and is as wrong of {others} more' if others else ''}; what is stored is used.",
            stacklevel=2,
        )


def _keep_blocks(model: nn.Module, trunk: Mapping[str, TensorRef]) -> set[str]:
    """Put a layer of blocks wherever a plain linear layer is stored in them; return the names of
    their matrices."""
    stored = {name: ref for name, ref in trunk.items() if ref.dtype in BLOCK_MODES}
    modules, made = dict(model.named_modules()), {}
    for name, ref in stored.items():
        path, width = name.rpartition(".")[0], BLOCK_MODES[ref.dtype].elements
        linear = modules.get(path)
        if not isinstance(linear, nn.Linear):
            continue
        out, columns = linear.weight.shape
        if columns % width:
            raise _wrong_shape(ref, ref.shape, (out, f"blocks of {width} in {columns}"))
        made[path] = BlocksLinear(columns, out, ref.dtype)
    model.update_modules(tree_unflatten(list(made.items())))
    return {f"{path}.weight" for path in made}


def infer_spec(
    weight: TensorRef, scales: TensorRef, width: int, *, global_scale: bool = False
) -> QuantSpec:
    """Return the quantisation of a weight with rows of `width` elements, from two shapes and the
    dtype of the scales. global_scale: There is one besides.

    Raises:
        CheckpointError: The shapes fit no supported quantisation.
    """
    groups, words, byte_scales = scales.shape[-1], weight.shape[-1], scales.dtype == "U8"
    with suppress(MoefluxError):
        spec = QuantSpec.of_shapes(
            width, words, groups, byte_scales=byte_scales, global_scale=global_scale
        )
        if weight.dtype == "U32" and (byte_scales or scales.dtype in FLOATS):
            return spec
    raise CheckpointError(
        f"{weight.file}: '{weight.name}' {weight.dtype} {list(weight.shape)} with scales "
        f"{scales.dtype} {list(scales.shape)} is no quantisation of rows of {width} elements in "
        f"groups of {', '.join(map(str, GROUP_SIZES))}."
    )


def _describe(spec: QuantSpec | None) -> str:
    if spec is None:
        return "floats"
    mode = "" if spec.is_affine else f" ({spec.mode})"
    return f"{spec.bits} bits, groups of {spec.group_size}{mode}"


class ExpertsOnDisk:
    """The experts of a resident model, parameters of its MoE blocks, and where they are read from.

    blocks: MoE layer id -> block. layers: The same ids -> components, and the quantisation of each
    projection. activation: Of the experts.
    """

    def __init__(
        self,
        blocks: Mapping[int, SparseMoeBlock],
        layers: Mapping[int, tuple[Mapping[str, ExpertRefs], Mapping[str, QuantSpec | None]]],
        activation: Activation,
    ):
        self._blocks, self._layers = blocks, layers
        self._activation, self._packed = activation, False
        self._files = Watch({layer: components for layer, (components, _) in layers.items()})

    def bank(self, layer: int) -> ExpertBank:
        """Return the experts of a layer."""
        switch: Any = self._blocks[layer].switch_mlp
        return switch.bank()

    def read(self, *, verbose: bool = False) -> None:
        """Read all experts. verbose: Show a bar on stderr.

        Raises:
            ExpertFileError: A file has changed since this object was made.
        """
        self._files.check()
        experts = load_experts(self._layers[i] for i in self._blocks)
        shown = {"desc": "load experts", "unit": "layer", "leave": False, "file": sys.stderr}
        # Closed before anything else is written, errors too.
        with tqdm(experts, total=len(self._blocks), disable=not verbose, **shown) as bar:
            for block, switch in zip(self._blocks.values(), bar, strict=True):
                switch._activation = self._activation
                block.switch_mlp = switch
                if self._packed:
                    pack(switch)

    def free(self) -> None:
        """Free all experts; blocks have none until they are read."""
        for block in self._blocks.values():
            if block.switch_mlp:
                self._packed = is_packed(block.switch_mlp)
                block.switch_mlp = _empty(SwitchGLU)


def load_experts(
    layers: Iterable[tuple[Mapping[str, ExpertRefs], Mapping[str, QuantSpec | None]]],
) -> Iterator[SwitchGLU]:
    """Yield all experts of each layer as parameters, evaluated, in the dtypes of the file, which a
    streamed bank has as well.

    layers: Components and the quantisation of each projection.
    """
    layers = list(layers)
    groups = [stacks_of(components) for components, _ in layers]
    for (components, specs), stacks, arrays in zip(
        layers, groups, load_groups(groups), strict=True
    ):
        check_stacks(components, stacks)
        switch = _empty(SwitchGLU)
        for projection in PROJECTIONS:
            switch[projection] = _empty(ExpertProjection)
            switch[projection].spec = specs[projection]
        for name in components:
            projection, _, part = name.rpartition(".")
            array = arrays.pop(0)
            # mlx-lm's shape of global scales is [E].
            switch[projection][part] = array.reshape(-1) if part == GLOBAL_SCALE else array
            mx.eval(switch[projection][part])
        for projection in PROJECTIONS:
            if specs[projection] is not None:
                switch[projection].freeze()
        switch.eval()
        yield switch


def _empty(kind: type[M]) -> M:
    """Return a module without parameters: none is drawn that a checkpoint replaces."""
    module = kind.__new__(kind)
    nn.Module.__init__(module)
    return module

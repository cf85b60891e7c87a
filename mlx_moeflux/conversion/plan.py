"""Plan a conversion: each weight in row chunks, and the new config.json."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlx_moeflux.checkpoint.blocks import BLOCK_MODES
from mlx_moeflux.checkpoint.config import QUANTIZATION_KEYS
from mlx_moeflux.checkpoint.names import (
    BIAS,
    GLOBAL_SCALE,
    PARTS,
    PROJECTIONS,
    MappedTensors,
    Transform,
    map_head,
    stored_head_name,
)
from mlx_moeflux.checkpoint.quantization import GROUP_SIZES, Quantization, QuantSpec
from mlx_moeflux.checkpoint.source import APPROXIMATED, Checkpoint
from mlx_moeflux.checkpoint.tensors import ExpertRefs, TensorRef, mlx_dtype
from mlx_moeflux.checkpoint.writer import Tensor
from mlx_moeflux.errors import CheckpointError, InputError
from mlx_moeflux.kernels.linear.quantised import scaled, settings
from mlx_moeflux.models import model_class, read_config
from mlx_moeflux.models.decoder import DecoderModel
from mlx_moeflux.models.weights import (
    FLOATS,
    check_experts,
    compare_with_config,
    expert_specs,
    infer_spec,
    match_head,
    match_trunk,
)

# Elements of a row chunk: 16 Mi of float32 are 64 MiB.
CHUNK_ELEMENTS = 16 << 20
CODES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


@dataclass(frozen=True)
class Recipe:
    """The conversion of one weight.

    source: its weight and, when quantised in words, scales and, if affine, biases.
    spec: how it is quantised on disk now.
    target: how it shall be.
    dtype: code of the output's floats.
    transform: of its rows.
    bias: What is added to its product, a part of an expert.
    global_scale: Of a `spec` that has one.
    """

    source: tuple[TensorRef, ...]
    spec: QuantSpec | None
    target: QuantSpec | None
    dtype: str
    transform: Callable[[mx.array], mx.array] | None = None
    bias: TensorRef | None = None
    global_scale: TensorRef | None = None

    def outputs(self) -> dict[str, Tensor]:
        """Part (``weight``, ``scales``, ``biases``, ``global_scale``, ``bias``) -> what will be
        written."""
        bias = {} if self.bias is None else {BIAS: Tensor(self._bias_code(), self.bias.shape)}
        kept = self.target is not None and self.target.global_scale
        return self._matrix() | ({GLOBAL_SCALE: Tensor("F32", (1,))} if kept else {}) | bias

    def _bias_code(self) -> str:
        assert self.bias is not None
        return self.bias.dtype if self.spec is not None and self.spec == self.target else self.dtype

    def _matrix(self) -> dict[str, Tensor]:
        shape, width = self.source[0].shape, self._width()
        # A matrix, or one for each head.
        *rows, _ = shape or (0,)
        if self.target is not None:
            code, count = self.target.row(width)
            of_groups = self.dtype if self.target.is_affine else "U8"
            scales = Tensor(of_groups, (*rows, self.target.groups(width)))
            return dict.fromkeys(self.target.parts, scales) | {
                "weight": Tensor(code, (*rows, count))
            }
        if self.spec is not None:
            shape = (*rows, width)
        elif self.transform is not None:
            # One row tells the shape of all.
            shape = (shape[0], *self.transform(mx.zeros((1, *shape[1:]))).shape[1:])
        return {"weight": Tensor(self.dtype, shape)}

    def _width(self) -> int:
        last = self.source[0].shape[-1]
        return last if self.spec is None else self.spec.width(last)

    def chunks(self) -> Iterator[tuple[str, int, bytes]]:
        """(part, byte offset in that part, bytes), a row chunk at a time.

        Evaluates: each chunk.
        """
        ref = self.source[0]
        if not ref.shape:
            yield "weight", 0, _bytes(self._cast(ref.load()))
            return
        step = max(1, CHUNK_ELEMENTS // max(self._width(), prod(ref.shape[1:])))
        done: dict[str, int] = dict.fromkeys(PARTS, 0)
        for start in range(0, ref.shape[0], step):
            stop = min(start + step, ref.shape[0])
            for part, data in self._rows(start, stop).items():
                yield part, done[part], data
                done[part] += len(data)
        if self.global_scale is not None and self.target is not None:
            yield GLOBAL_SCALE, 0, _bytes(self.global_scale.load())
        if self.bias is not None:
            yield BIAS, 0, _bytes(self.bias.load().astype(mlx_dtype(self._bias_code())))

    def _rows(self, start: int, stop: int) -> dict[str, bytes]:
        arrays = [ref.rows(start, stop).load() for ref in self.source]
        if self.spec is not None and self.spec == self.target:
            parts = [arrays[0], *map(self._cast, arrays[1:])]
        else:
            w = arrays[0]
            if self.spec is not None and self.spec.block is not None:
                w = self.spec.block.decode(w, mx)
            elif self.spec is not None:
                biases = arrays[2] if self.spec.is_affine else None
                w = mx.dequantize(w, arrays[1], biases, **settings(self.spec))
            if self.global_scale is not None:
                w = scaled(w, self.global_scale.load(), mx.float32)
            if self.transform is not None:
                w = self.transform(w)
            parts = [self._cast(w)]
            if self.target is not None:
                parts = mx.quantize(parts[0], **settings(self.target))
        return {part: _bytes(array) for part, array in zip(PARTS, parts, strict=False)}

    def _cast(self, array: mx.array) -> mx.array:
        floats = mx.issubdtype(array.dtype, mx.floating)
        return array.astype(mlx_dtype(self.dtype)) if floats else array


def _bytes(array: mx.array) -> bytes:
    array = mx.contiguous(array)
    mx.eval(array)
    if not array.ndim:
        return np.array(array).tobytes()
    return bytes(memoryview(array).cast("B"))  # pyright: ignore[reportArgumentType]


def _nbytes(recipes: Iterable[Recipe]) -> int:
    return sum(tensor.nbytes for recipe in recipes for tensor in recipe.outputs().values())


def table_spec(spec: QuantSpec | None, width: int) -> QuantSpec | None:
    """Return how rows of `width` numbers are quantised where matrices are as `spec`: with the
    largest groups that divide a row, at most the matrices'. None: They stay floats."""
    if spec is None or not spec.is_affine:
        return None
    sizes = [size for size in GROUP_SIZES if size <= spec.group_size and width % size == 0]
    return QuantSpec(spec.bits, max(sizes)) if sizes else None


Held = Callable[[Sequence[int], int], dict[int, tuple[int, ...]]]
LAYOUTS = ("packed", "safetensors")


class Conversion:
    """All recipes of a conversion, under the names of the model.

    trunk: Parameter's name -> recipe. experts: MoE layer id -> projection -> recipe of expert 0,
    which says what all of them become. held: MoE layer id -> the experts to write, None for all;
    made by the argument of (layers, number of experts). head_experts: Path of a projection of a
    head of multi-token prediction in the output -> recipe of expert 0; empty: no head is written.
    head_count: Number of its experts.
    total_bytes: Of all tensors of the output.

    Raises:
        ConfigError, UnsupportedError, CheckpointError: The checkpoint is not one we know.
        InputError: It is quantised already, or its blocks are not to be packed.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        layout: str,
        spec: QuantSpec | None,
        dequantize: bool,
        dtype: str | None,
        strict: bool,
        held: Held | None = None,
        mtp: bool = True,
    ):
        self.config = read_config(checkpoint, strict=strict)
        kind = model_class(checkpoint.config["model_type"])
        self.checkpoint, self.layout, self.kind = checkpoint, layout, kind
        self.spec, self.dequantize, self.code = spec, dequantize, CODES.get(dtype or "")
        self.mapped: MappedTensors = checkpoint.mapped(self.config.name_rules())
        whole = kind(self.config)
        layouts = check_experts(whole, self.mapped, directory=checkpoint.directory)
        matched = match_trunk(whole, self.mapped, directory=checkpoint.directory)
        specs = {**matched.specs, **expert_specs(layouts)}
        compare_with_config(checkpoint, self.config.name_rules(), specs)
        self.kind.check_tables(self.mapped.tables, self.config, checkpoint.config_file)
        self.trunk = self._trunk_recipes() | self._table_recipes()
        self.experts = {
            layer: {p: self.expert_recipe(layer, p, 0) for p in PROJECTIONS}
            for layer in self.mapped.experts
        }
        every_expert = [recipe for recipes in self.experts.values() for recipe in recipes.values()]
        self._head: MappedTensors | None = None
        self.head_experts: dict[str, Recipe] = {}
        self.head_count = 0
        # mlx-lm takes a checkpoint with a head for an original.
        if mtp and layout == "packed" and held is None:
            self._plan_head(whole)
        self.total_bytes = _nbytes(self.trunk.values())
        self.total_bytes += _nbytes(self.head_experts.values()) * self.head_count
        self.held = None if held is None else held(sorted(self.experts), self.config.num_experts)
        count = self.config.num_experts
        if self.held is not None:
            count = len(next(iter(self.held.values())))
        self.total_bytes += _nbytes(every_expert) * count

    def output_name(self, name: str) -> str:
        """Return the name in the output of parameter or module `name`."""
        return name if self.layout == "packed" else self.kind.mlx_lm_name(name)

    def identity(self) -> str:
        """Hash of the source's files and the options; a resumed run must have the same."""
        options = [self.layout, str(self.spec), self.dequantize, self.code]
        options += [] if self.held is None else [sorted(self.held.items())]
        options += [] if self._head is None else ["mtp"]
        files = {ref.file for ref in self.checkpoint.tensors.values()}
        files |= set() if self._head is None else {ref.file for ref in self._head.trunk.values()}
        files |= {refs[0].file for parts in self.mapped.experts.values() for refs in parts.values()}
        stats = {str(file.resolve()): file.stat() for file in sorted(files)}
        found = {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats.items()}
        text = json.dumps([self.checkpoint.identity(), options, found])
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def expert_recipe(self, layer: int, projection: str, expert: int) -> Recipe:
        """Return the conversion of one projection of one expert."""
        return self._expert_recipe(self.mapped.experts[layer], projection, expert)

    def head_recipe(self, path: str, expert: int) -> Recipe:
        """Return the conversion of one expert of a projection of `head_experts`."""
        assert self._head is not None, "no head is written"
        return self._expert_recipe(self._head.experts[0], path.rpartition(".")[2], expert)

    def _expert_recipe(
        self, components: Mapping[str, ExpertRefs], projection: str, expert: int
    ) -> Recipe:
        source = tuple(
            components[f"{projection}.{part}"][expert]
            for part in PARTS
            if f"{projection}.{part}" in components
        )
        first = source[0]
        spec, target, whole = None, self.spec, components.get(f"{projection}.{GLOBAL_SCALE}")
        down = projection == "down_proj"
        width = self.config.moe_intermediate_size if down else self.config.hidden_size
        if len(source) > 1:
            spec = infer_spec(first, source[1], width, global_scale=whole is not None)
            target = self._requantised(first, spec)
        elif first.dtype in BLOCK_MODES:
            spec = QuantSpec.of_mode(first.dtype)
            target = self._requantised(first, spec)
            if target is not None and self.layout != "packed":
                raise InputError(
                    f"{first.file}: mlx-lm has no {spec.mode}, in which '{first.name}' is; "
                    "convert to the packed layout, or dequantize."
                )
        bias = components.get(f"{projection}.{BIAS}")
        added = None if bias is None else bias[expert]
        one = None if whole is None else whole[expert]
        return Recipe(source, spec, target, self._code(source, spec), bias=added, global_scale=one)

    def config_json(self) -> dict[str, Any]:
        """The output's config.json: the checkpoint's, with the bits and the head of the output, and
        what was not read exactly."""
        config = copy.deepcopy(self.checkpoint.config)
        for key in QUANTIZATION_KEYS:
            config.pop(key, None)
        if self.checkpoint.approximated:
            config[APPROXIMATED] = self.checkpoint.approximated
        config["tie_word_embeddings"] = tied = self.config.tie_word_embeddings
        if isinstance(text := config.get("text_config"), dict) and "tie_word_embeddings" in text:
            text["tie_word_embeddings"] = tied
        if self.layout != "packed":
            config = self.kind.mlx_lm_config(self.config, config)
        specs: dict[str, QuantSpec | None] = {}
        for name, recipe in self.trunk.items():
            if len(recipe.outputs()) > 1:
                specs[self.output_name(name.removesuffix(".weight"))] = recipe.target
        for layer, recipes in self.experts.items():
            for projection, recipe in recipes.items():
                path = f"model.layers.{layer}.mlp.switch_mlp.{projection}"
                specs[self.output_name(path)] = recipe.target
        specs |= {path: recipe.target for path, recipe in self.head_experts.items()}
        kinds = [spec for spec in specs.values() if spec is not None]
        if kinds:
            default = max(set(kinds), key=kinds.count)
            others = {path: spec for path, spec in specs.items() if spec != default}
            block = Quantization(default, others).to_config()
            config |= {"quantization": block, "quantization_config": block}
        return config

    def _trunk_recipes(self) -> dict[str, Recipe]:
        """Module path + '.weight' (or a bare parameter's name) -> recipe."""
        trunk = dict(self.mapped.trunk)
        if self.config.tie_word_embeddings:
            trunk = {n: r for n, r in trunk.items() if not n.startswith("lm_head.")}
        model = self.kind(self.config)
        model.fit_names(trunk)
        return self._recipes(trunk, model, self.kind.conversions(trunk))

    def _plan_head(self, model: DecoderModel) -> None:
        """Add the recipes of a head of multi-token prediction, if there is one.

        Raises:
            CheckpointError: It does not fit the config.
        """
        rules = self.config.name_rules()
        if self.config.prediction() is None:
            return
        try:
            mapped = map_head(self.checkpoint.prediction(self.mapped), rules)
            if not mapped.trunk:
                return
            count = mapped.count_of(0)
            head = model.HEAD(model, num_experts=count)
            matched, _ = match_head(head, mapped, directory=self.checkpoint.directory)
        except CheckpointError as error:
            raise CheckpointError(
                f"{error} To leave it out, give --no-mtp or mtp=False."
            ) from error
        head = model.HEAD(model, num_experts=count)  # whose modules are not quantised
        head.body.fit_names(mapped.trunk)
        for name, recipe in self._recipes(mapped.trunk, head, matched.transforms).items():
            self.trunk[stored_head_name(name, rules)] = recipe
        self._head, self.head_count = mapped, count or 0
        for projection in PROJECTIONS:
            path = stored_head_name(f"model.layers.0.mlp.switch_mlp.{projection}", rules)
            self.head_experts[path] = self.head_recipe(path, 0)

    def _recipes(
        self, trunk: Mapping[str, TensorRef], root: nn.Module, transforms: Mapping[str, Transform]
    ) -> dict[str, Recipe]:
        """Return the recipes of tensors that are parameters of `root`, by their names there."""
        modules = dict(root.named_modules())
        recipes: dict[str, Recipe] = {}
        for name, ref in trunk.items():
            base, _, leaf = name.rpartition(".")
            if leaf in ("scales", "biases", GLOBAL_SCALE) and f"{base}.weight" in trunk:
                continue
            source, spec, whole = (ref,), None, None
            if f"{base}.scales" in trunk and leaf == "weight":
                names = (f"{base}.{part}" for part in PARTS)
                source = tuple(trunk[part] for part in names if part in trunk)
                width, whole = modules[base].weight.shape[-1], trunk.get(f"{base}.{GLOBAL_SCALE}")
                spec = infer_spec(source[0], source[1], width, global_scale=whole is not None)
            target = self._target(base, ref, spec, modules.get(base) if leaf == "weight" else None)
            dtype = "F32" if self.kind.keeps_float32(name) else self._code(source, spec)
            if name in transforms and len(ref.shape) == 1 and self.layout == "packed":
                # 1 + w does not fit the 8 bits of a bfloat16; mlx-lm's layout rounds it.
                dtype = "F32"
            transform = transforms.get(name)
            recipes[name] = Recipe(source, spec, target, dtype, transform, global_scale=whole)
        return recipes

    def _table_recipes(self) -> dict[str, Recipe]:
        """Name of the weight of each shard of a table -> recipe."""
        recipes = {}
        for layer, shards in self.mapped.tables.items():
            path, width = self.config.table_path(layer), self.config.ngram_width
            for i, shard in enumerate(shards):
                source = tuple(shard[part] for part in PARTS if part in shard)
                spec, target = None, table_spec(self.spec, width)
                if len(source) > 1:
                    spec = infer_spec(source[0], source[1], width)
                    target = self._requantised(source[0], spec)
                recipe = Recipe(source, spec, target, self._code(source, spec))
                recipes[f"{path}.shards.{i}.weight"] = recipe
        return recipes

    def _target(
        self, base: str, ref: TensorRef, spec: QuantSpec | None, module: nn.Module | None
    ) -> QuantSpec | None:
        if spec is not None:
            kept, floats = self._requantised(ref, spec), not hasattr(module, "to_quantized")
            # mlx-lm knows global scales of experts alone, and routers in floats.
            return None if (spec.global_scale or floats) and self.layout != "packed" else kept
        if self.spec is None or not hasattr(module, "to_quantized"):
            return None
        if ref.shape[-1] % self.spec.group_size:
            return None
        if base.endswith((".mlp.gate", "shared_expert_gate")):
            router = QuantSpec(8, self.spec.group_size) if self.spec.is_affine else QuantSpec(8)
            return None if ref.shape[-1] % router.group_size else router
        return self.spec

    def _requantised(self, ref: TensorRef, spec: QuantSpec) -> QuantSpec | None:
        if self.spec is not None:
            raise InputError(
                f"{ref.file}: '{ref.name}' is quantised already; convert with dequantize first."
            )
        return None if self.dequantize else spec

    def _code(self, source: tuple[TensorRef, ...], spec: QuantSpec | None) -> str:
        stored = source[-1].dtype
        if spec is not None and spec.block is not None:
            stored = "F32"  # what blocks decode to
        elif len(source) > 1 and stored not in FLOATS:
            stored = "BF16"  # what scales of one byte decode to without rounding
        return self.code if self.code and stored in FLOATS else stored

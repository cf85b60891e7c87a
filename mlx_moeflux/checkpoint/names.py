"""From the names in a checkpoint to the names of the model: a table that must come out empty.

A model declares :class:`NameRules`: prefixes to rewrite, tensors to drop, and patterns of
routed-expert tensors. Every tensor of the checkpoint must be taken by a rule and every parameter of
the model must be filled.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import TYPE_CHECKING, cast

from mlx_moeflux.checkpoint.formats.decoded import PickedRef
from mlx_moeflux.checkpoint.tables import Shard, Tables
from mlx_moeflux.checkpoint.tensors import ExpertRefs, StackedRefs, TensorRef
from mlx_moeflux.errors import CheckpointError

if TYPE_CHECKING:
    import mlx.core as mx

Transform = Callable[["mx.array"], "mx.array"]

PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
PARTS = ("weight", "scales", "biases")
GLOBAL_SCALE = "global_scale"
"""Float32 number of a whole matrix in NVFP4, see :mod:`mlx_moeflux.checkpoint.quantization`."""
BIAS = "bias"
"""Component that a projection adds to its product; `biases` belong to a quantisation."""
COMPONENT_ORDER = tuple(f"{p}.{part}" for p in PROJECTIONS for part in (*PARTS, GLOBAL_SCALE, BIAS))
_PARTS = "|".join((*PARTS, GLOBAL_SCALE))


@dataclass(frozen=True)
class Experts:
    """The names of tensors with routed experts.

    `pattern` has the groups ``layer``, optionally ``expert`` (absent: the tensor stacks all
    experts on axis 0), and optionally ``projection`` and ``part``. `components` names what the
    tensor holds when the pattern does not: several names share the rows in equal parts; a name
    without a part has the pattern's. `interleaved`: The rows of a stack belong to its names
    alternately. `transposed`: The matrices of a stack are ``[in, out]``.
    """

    pattern: str
    components: tuple[str, ...] = ()
    interleaved: bool = False
    transposed: bool = False


EXPERT_NAMES = (
    Experts(
        r"model\.layers\.(?P<layer>\d{1,9})\.mlp\.switch_mlp"
        rf"\.(?P<projection>gate_proj|up_proj|down_proj)\.(?P<part>{_PARTS})"
    ),
    Experts(
        r"model\.layers\.(?P<layer>\d{1,9})\.mlp\.experts\.gate_up_proj",
        ("gate_proj.weight", "up_proj.weight"),
    ),
    Experts(r"model\.layers\.(?P<layer>\d{1,9})\.mlp\.experts\.down_proj", ("down_proj.weight",)),
    Experts(
        r"model\.layers\.(?P<layer>\d{1,9})\.mlp\.experts\.gate_up_proj"
        rf"\.(?P<part>{'|'.join(PARTS)})",
        ("gate_proj", "up_proj"),
    ),
    Experts(
        r"model\.layers\.(?P<layer>\d{1,9})\.mlp\.experts\.down_proj"
        rf"\.(?P<part>{'|'.join(PARTS)})",
        ("down_proj",),
    ),
    Experts(
        r"model\.layers\.(?P<layer>\d{1,9})\.mlp\.experts\.(?P<expert>\d{1,9})"
        rf"\.(?P<projection>gate_proj|up_proj|down_proj)\.(?P<part>{_PARTS})"
    ),
)
"""mlx-lm's stacks, transformers' fused tensors, the same packed, whose weights may lack the end
``.weight``, and one tensor for each expert."""


ROTARY_BUFFERS = r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"
"""Names of frequencies that older exporters write and models compute."""


# Layer and part of a tensor's name.
_LAYER = re.compile(r"model\.layers\.(\d{1,9})\.(\w+)\..*")
# Multi-token prediction: parts that only a layer of it has, in canonical names (DeepSeek-V3 and
# V3.2, GLM-4.5 to 5), and names of a module of its own as they are stored (Qwen).
_PREDICTION_PARTS = {"eh_proj", "enorm", "hnorm", "shared_head"}
_PREDICTION_MODULE = re.compile(r"(?:(?:model\.)?language_model\.)?(?:model\.)?mtp\.(.*)")
# Parts of a head of multi-token prediction that no layer of a model has: name in a layer or in a
# module -> name in :class:`~mlx_moeflux.models.mtp.PredictionHead`. Of None, the head uses the
# model's own.
_HEAD_PARTS: dict[str, str | None] = {
    "eh_proj": "fc",
    "enorm": "pre_fc_norm_embedding",
    "hnorm": "pre_fc_norm_hidden",
    "shared_head.norm": "model.norm",
    "shared_head.head": None,
    "embed_tokens": None,
    "norm": "model.norm",
    "hyper_connection_mixer": "model.hyper_connection_mixer",
    "layers.0": "model.layers.0",
}


@dataclass(frozen=True)
class NameRules:
    """The whole table of one architecture. First match wins in every list, except `renames`, which
    all apply in order.

    prefixes: (prefix, replacement). renames: (regular expression, replacement as ``re.sub`` takes
    it) of inner parts that the model names otherwise; they apply after the prefix. drops: Regular
    expressions of whole names in the checkpoint, of tensors that inference does not need. layers:
    Number of the model's layers, if layers of multi-token prediction may follow them: at least
    `predictions` of them, as config.json says, and each that has such a layer's parts.
    prediction_module: Multi-token prediction may be a module of its own. tables: Regular
    expressions of tensors that belong to a table of a layer, see
    :class:`~mlx_moeflux.checkpoint.tables.Tables`.
    """

    prefixes: tuple[tuple[str, str], ...] = ()
    renames: tuple[tuple[str, str], ...] = ()
    drops: tuple[str, ...] = ()
    experts: tuple[Experts, ...] = ()
    layers: int | None = None
    predictions: int = 0
    prediction_module: bool = False
    tables: tuple[str, ...] = ()

    def canonical(self, name: str) -> str:
        """Return the model's name of a checkpoint's tensor."""
        for prefix, replacement in self.prefixes:
            if name.startswith(prefix):
                name = replacement + name[len(prefix) :]
                break
        for pattern, replacement in self.renames:
            name = re.sub(pattern, replacement, name)
        return name

    def module(self, path: str) -> str:
        """Return the model's path of a module that config.json names as the checkpoint does; a
        projection of experts in any layout is that of mlx-lm's stack."""
        name = self.canonical(f"{path}.weight")
        for rule in self.experts:
            match = re.fullmatch(rule.pattern, name)
            if match is not None and match.groupdict().get("projection"):
                return f"model.layers.{match['layer']}.mlp.switch_mlp.{match['projection']}"
        return name.removesuffix(".weight")

    def is_dropped(self, name: str) -> bool:
        """Return True if a pattern of `drops` matches."""
        return any(re.fullmatch(pattern, name) for pattern in self.drops)

    def in_prediction_module(self, name: str) -> bool:
        """Return True if a tensor of the checkpoint belongs to a module of multi-token
        prediction."""
        return self.prediction_module and _PREDICTION_MODULE.fullmatch(name) is not None

    def prediction_layers(self, names: Iterable[str]) -> set[int]:
        """Return the layers of multi-token prediction among canonical names of tensors."""
        if self.layers is None:
            return set()
        found = filter(None, map(_LAYER.fullmatch, names))
        marked = {int(m[1]) for m in found if m[2] in _PREDICTION_PARTS}
        first = self.layers
        return {i for i in marked if i >= first} | set(range(first, first + self.predictions))


@dataclass
class MappedTensors:
    """A checkpoint under the model's own names.

    trunk: parameter name -> tensor. experts: MoE layer id -> component name -> one
    :class:`TensorRef` per expert, components in block order. absent: name -> shard, of tensors that
    an index names and no file has, without those that are dropped. tables: layer -> shards of its
    table in order, one if it is whole; they are no parameters. prediction: name that is stored ->
    tensor of multi-token prediction, which drafts tokens; no parameters, and nothing reads them.
    """

    trunk: dict[str, TensorRef] = field(default_factory=dict)
    experts: dict[int, dict[str, ExpertRefs]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    tables: dict[int, list[Shard]] = field(default_factory=dict)
    prediction: dict[str, TensorRef] = field(default_factory=dict)

    def count_of(self, layer: int) -> int | None:
        """Return how many experts a layer has, None if it has none."""
        return next((len(refs) for refs in self.experts.get(layer, {}).values()), None)


_Single = dict[tuple[int, str], dict[int, TensorRef]]
"""(Layer, component) -> expert -> its own tensor."""


def map_tensors(tensors: Mapping[str, TensorRef], rules: NameRules) -> MappedTensors:
    """Apply `rules` to every tensor; nothing is read.

    Raises:
        CheckpointError: Two tensors claim one name, an expert is missing from a layer, or the
            shards of a table do not make one.
    """
    mapped, tables = MappedTensors(), Tables(rules.tables)
    single: _Single = {}
    names = {name: rules.canonical(name) for name in tensors}
    predicted = rules.prediction_layers(names.values())
    for name, ref in tensors.items():
        canonical = names[name]
        layer = _LAYER.fullmatch(canonical) if predicted else None
        if rules.is_dropped(name):
            continue
        in_layer = layer is not None and int(layer[1]) in predicted
        if in_layer or rules.in_prediction_module(name):
            mapped.prediction[name] = ref
            continue
        if tables.take(canonical, ref):
            continue
        if not _take_expert(canonical, ref, rules, mapped, single):
            if canonical in mapped.trunk:
                raise CheckpointError(
                    f"{ref.file}: '{name}' and '{mapped.trunk[canonical].name}' are both "
                    f"the parameter '{canonical}'; remove one."
                )
            mapped.trunk[canonical] = ref
    for (layer, component), by_expert in single.items():
        _put(mapped, layer, component, _as_sequence(layer, component, by_expert))
    mapped.experts = in_block_order(mapped.experts)
    mapped.tables = tables.ordered()
    return mapped


def map_head(prediction: Mapping[str, TensorRef], rules: NameRules) -> MappedTensors:
    """Return the first head of multi-token prediction under the names of
    :class:`~mlx_moeflux.models.mtp.PredictionHead`, whose layer is layer 0; others are left out.

    prediction: As :class:`MappedTensors` has it, or tensors of other files; where none of these is
    named as one of a head, all are, and their names lack the beginning. rules: Of the model's
    checkpoint.

    Raises:
        CheckpointError: See :func:`map_tensors`.
    """
    marked = {name: ref for name, ref in prediction.items() if _is_heads(name, rules)}
    named = {_head_name(name, rules): ref for name, ref in (marked or prediction).items()}
    named.pop(None, None)
    inner = replace(rules, prefixes=(), layers=None, prediction_module=False)
    return map_tensors(cast("dict[str, TensorRef]", named), inner)


def stored_head_name(name: str, rules: NameRules) -> str:
    """Return the name under which a checkpoint of `rules` stores a head's part `name`, as
    :func:`map_head` gives it, with experts in mlx-lm's names."""
    if rules.prediction_module:
        return f"mtp.{name.removeprefix('model.')}"
    layer = f"model.layers.{rules.layers}."
    for part, renamed in _HEAD_PARTS.items():
        if renamed is not None and name.startswith(f"{renamed}."):
            rest = name.removeprefix(renamed)
            return layer + (rest[1:] if part == "layers.0" else part + rest)
    return layer + name


def _is_heads(name: str, rules: NameRules) -> bool:
    """Return True if the name is one of a head's tensor."""
    layer = _LAYER.fullmatch(rules.canonical(name))
    behind = layer is not None and rules.layers is not None and int(layer[1]) >= rules.layers
    return behind or _PREDICTION_MODULE.fullmatch(name) is not None


def _head_name(name: str, rules: NameRules) -> str | None:
    """Return the name of a head's tensor, None if it is of no use."""
    module = _PREDICTION_MODULE.fullmatch(name)
    rest = module[1] if module else rules.canonical(name)
    start = ""
    if (layer := _LAYER.fullmatch(rest)) is not None:
        if int(layer[1]) != rules.layers:
            return None
        rest, start = rest[layer.start(2) :], "model.layers.0."
    for part, renamed in _HEAD_PARTS.items():
        if rest.startswith(f"{part}."):
            return renamed and renamed + rest.removeprefix(part)
    return start + rest


def in_block_order(experts: dict[int, dict[str, ExpertRefs]]) -> dict[int, dict[str, ExpertRefs]]:
    """The same with ascending layers, the components of each in :data:`COMPONENT_ORDER`."""
    return {
        layer: {name: refs[name] for name in COMPONENT_ORDER if name in refs}
        for layer, refs in sorted(experts.items())
    }


def _take_expert(
    canonical: str, ref: TensorRef, rules: NameRules, mapped: MappedTensors, single: _Single
) -> bool:
    for rule in rules.experts:
        match = re.fullmatch(rule.pattern, canonical)
        if match is None:
            continue
        groups = match.groupdict()
        layer = int(groups["layer"])
        components = rule.components or (f"{groups['projection']}.{groups['part']}",)
        if rule.components and groups.get("part") is not None:
            components = tuple(f"{name}.{groups['part']}" for name in rule.components)
        if groups.get("part") == GLOBAL_SCALE:
            ref = _one_number_each(ref, stacked=groups.get("expert") is None)
        if rule.interleaved or rule.transposed:
            _put_picked(mapped, layer, components, ref, rule)
            return True
        if groups.get("expert") is not None:
            single.setdefault((layer, components[0]), {})[int(groups["expert"])] = ref
            return True
        if len(ref.shape) < 2 or ref.shape[1] % len(components):
            raise CheckpointError(
                f"{ref.file}: '{ref.name}' has shape {list(ref.shape)}; expected experts on "
                f"axis 0 and {len(components)} equal parts on axis 1."
            )
        rows = ref.shape[1] // len(components)
        for i, component in enumerate(components):
            window = (i * rows, (i + 1) * rows) if len(components) > 1 else None
            _put(mapped, layer, component, StackedRefs(ref, window))
        return True
    return False


def _one_number_each(ref: TensorRef, *, stacked: bool) -> TensorRef:
    """Return the global scales of a stack as ``[E, 1]``, that of one expert as ``[1]``."""
    shape = (*ref.shape[:1], 1) if stacked else (1,)
    if prod(ref.shape) != prod(shape) or (stacked and not ref.shape):
        raise CheckpointError(
            f"{ref.file}: '{ref.name}' has shape {list(ref.shape)}; expected one number for each"
            " expert."
        )
    return ref if ref.shape == shape else replace(ref, shape=shape)


def _put_picked(
    mapped: MappedTensors, layer: int, components: tuple[str, ...], ref: TensorRef, rule: Experts
) -> None:
    """Take a stack whose components are interleaved or transposed."""
    axis, step = 2 if rule.transposed else 1, len(components)
    if len(ref.shape) <= axis or not ref.shape[0] or ref.shape[axis] % step:
        raise CheckpointError(
            f"{ref.file}: '{ref.name}' has shape {list(ref.shape)}; expected experts on axis 0 and "
            f"{step} interleaved parts on axis {axis}."
        )
    for first, component in enumerate(components):
        experts = (ref.index(e) for e in range(ref.shape[0]))
        picked = tuple(
            PickedRef(
                f"{each.name}.{component}",
                each,
                first=first,
                step=step,
                transposed=rule.transposed,
            )
            for each in experts
        )
        # Readers ask for what both kinds of reference have.
        _put(mapped, layer, component, cast("ExpertRefs", picked))


def _put(mapped: MappedTensors, layer: int, component: str, refs: ExpertRefs) -> None:
    components = mapped.experts.setdefault(layer, {})
    if component in components:
        raise CheckpointError(
            f"{refs[0].file}: layer {layer} has '{component}' of its experts twice "
            f"('{components[component][0].name}' and '{refs[0].name}'); remove one."
        )
    components[component] = refs


def _as_sequence(layer: int, component: str, by_expert: dict[int, TensorRef]) -> ExpertRefs:
    missing = [e for e in range(len(by_expert)) if e not in by_expert]
    if missing:
        raise CheckpointError(
            f"layer {layer}: '{component}' of expert {missing[0]} is missing although "
            f"expert {max(by_expert)} is there; fetch the shard that holds it."
        )
    first = by_expert[0]
    refs = tuple(by_expert[e] for e in range(len(by_expert)))
    for ref in refs:
        if (ref.shape, ref.dtype) != (first.shape, first.dtype):
            raise CheckpointError(
                f"{ref.file}: '{ref.name}' is {ref.dtype} {list(ref.shape)}, expert 0 is "
                f"{first.dtype} {list(first.shape)}."
            )
    return refs

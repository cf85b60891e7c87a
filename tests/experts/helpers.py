"""Tiny expert checkpoints on disk, in every form that they are published in."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from pathlib import Path

import mlx.core as mx
import numpy as np

from mlx_moeflux.checkpoint.quantization import QuantSpec
from mlx_moeflux.checkpoint.tensors import ExpertRefs, StackedRefs, StridedRefs, TensorRef
from mlx_moeflux.experts.io.layout import BlockLayout, Component
from mlx_moeflux.experts.io.readers import Reader
from mlx_moeflux.experts.policies.prefetch import AutoLookAhead, make_prefetch
from mlx_moeflux.experts.policies.timed_switch import TimedSwitch
from mlx_moeflux.experts.resident import ResidentStore
from mlx_moeflux.kernels.moe.expert_ffn import ExpertBank

E, K, C, F = 7, 3, 64, 128
LAYERS = (3, 5)
FORMS = ("packed", "stacked", "separate")
FOUR_BIT = (QuantSpec(4), QuantSpec(4), QuantSpec(4))
FLOATS = (None, None, None)
MIXED = (QuantSpec(3, 32), None, QuantSpec(8, 128))


@dataclass
class Experts:
    """The same experts as references to files and as arrays, layer -> name -> ``[E, ...]``."""

    layouts: dict[int, BlockLayout]
    arrays: dict[int, dict[str, mx.array]]
    refs: dict[int, dict[str, ExpertRefs]] = field(default_factory=dict)

    @property
    def num_experts(self) -> int:
        return next(iter(self.arrays[LAYERS[0]].values())).shape[0]

    def block(self, layer: int, expert: int) -> bytes:
        """One expert's bytes in block order."""
        arrays = (self.arrays[layer][c.name] for c in self.layouts[layer].components)
        parts = ((memoryview(a).cast("B"), a.nbytes // len(a)) for a in arrays)
        return b"".join(part[expert * size : (expert + 1) * size] for part, size in parts)

    def bank(self, layer: int) -> ExpertBank:
        return ExpertBank.of(self.arrays[layer], self.layouts[layer].specs)

    def resident(self, **options) -> ResidentStore:
        return ResidentStore(self.bank, layers=LAYERS, num_experts=self.num_experts, **options)


def in_pieces(reader: Reader, least: int = 1000) -> Reader:
    """The reader, which cuts blocks into parts of at least so many bytes."""
    reader.least_piece = least
    return reader


def affine_layout(hidden: int, inner: int, **specs: QuantSpec | None) -> BlockLayout:
    """A block of experts of these widths, quantised by `gate`, `up` and `down` or bfloat16."""
    components = []
    for part, spec in specs.items():
        rows, width = (hidden, inner) if part == "down" else (inner, hidden)
        if spec is None:
            components.append(Component(f"{part}_proj.weight", "BF16", (rows, width)))
            continue
        components.append(Component(f"{part}_proj.weight", "U32", (rows, spec.words(width))))
        groups = (rows, spec.groups(width))
        components += [Component(f"{part}_proj.{n}", "BF16", groups) for n in ("scales", "biases")]
    return BlockLayout(tuple(components))


def random_experts(specs=FOUR_BIT, *, num_experts=E, hidden=C, inner=F, seed=0) -> Experts:
    """Experts in memory only, every value random. Those of equal arguments share their arrays."""
    drawn = _drawn(tuple(specs), num_experts, hidden, inner, seed)
    mx.random.seed(seed)
    arrays = {layer: dict(of) for layer, of in drawn.arrays.items()}
    return Experts(dict(drawn.layouts), arrays)


@functools.cache
def _drawn(specs, num_experts: int, hidden: int, inner: int, seed: int) -> Experts:
    mx.random.seed(seed)
    experts = Experts({}, {})
    for layer in LAYERS:
        gate, up, down = specs
        layout = affine_layout(hidden, inner, gate=gate, up=up, down=down)
        arrays = {}
        for projection, spec in zip(("gate_proj", "up_proj", "down_proj"), specs, strict=True):
            shape = (hidden, inner) if projection == "down_proj" else (inner, hidden)
            weight = mx.random.normal((num_experts, *shape)) * shape[1] ** -0.5
            weight = weight.astype(mx.bfloat16)
            parts = (weight,)
            if spec is not None:
                parts = mx.quantize(weight, group_size=spec.group_size, bits=spec.bits)
            for part, array in zip(("weight", "scales", "biases"), parts, strict=False):
                arrays[f"{projection}.{part}"] = array
        mx.eval(arrays)
        experts.layouts[layer], experts.arrays[layer] = layout, arrays
    return experts


def write_experts(directory: Path, experts: Experts, form: str) -> Experts:
    """Write `experts` and fill in their refs.

    packed: blobs at a stride with a gap. stacked: one tensor of all experts per component.
    separate: one file per expert, components in an order of their own.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for layer in LAYERS:
        write = {"packed": _packed, "stacked": _stacked, "separate": _separate}[form]
        experts.refs[layer] = write(directory, experts, layer)
    return experts


def _packed(directory: Path, experts: Experts, layer: int) -> dict[str, ExpertRefs]:
    file, layout = directory / f"packed_{layer}.bin", experts.layouts[layer]
    stride = layout.nbytes + 100
    blocks = [experts.block(layer, e) + b"\xee" * 100 for e in range(experts.num_experts)]
    file.write_bytes(b"".join(blocks))
    return {
        c.name: StridedRefs(
            name=c.name,
            file=file,
            offset=layout.offsets[c.name],
            stride=stride,
            num_experts=experts.num_experts,
            dtype=c.dtype,
            shape=c.shape,
        )
        for c in layout.components
    }


def _stacked(directory: Path, experts: Experts, layer: int) -> dict[str, ExpertRefs]:
    file, refs = directory / f"stacked_{layer}.bin", {}
    with open(file, "wb") as handle:
        handle.write(b"\xee" * 13)
        for c in experts.layouts[layer].components:
            array = experts.arrays[layer][c.name]
            whole = TensorRef(c.name, file, handle.tell(), c.dtype, tuple(array.shape))
            refs[c.name] = StackedRefs(whole)
            handle.write(bytes(memoryview(array)))
    return refs


def _separate(directory: Path, experts: Experts, layer: int) -> dict[str, ExpertRefs]:
    refs: dict[str, list[TensorRef]] = {c.name: [] for c in experts.layouts[layer].components}
    for e in range(experts.num_experts):
        file = directory / f"layer_{layer}_expert_{e}.bin"
        with open(file, "wb") as handle:
            for c in reversed(experts.layouts[layer].components):
                ref = TensorRef(f"{c.name}.{e}", file, handle.tell(), c.dtype, c.shape)
                refs[c.name].append(ref)
                handle.write(bytes(memoryview(experts.arrays[layer][c.name][e])))
    return {name: tuple(by_expert) for name, by_expert in refs.items()}


def random_call(n: int, *, k=K, num_experts=E, hidden=C, seed=1, padding=0):
    """x ``[n, C]``, ids ``[n, k]`` ascending, weights; the last `padding` tokens are padding, and
    so is the last expert of the first token."""
    rng = np.random.default_rng(seed)
    ids = np.stack([np.sort(rng.choice(num_experts, k, replace=False)) for _ in range(n)])
    if padding:
        ids[n - padding :] = num_experts
        ids[0, -1] = num_experts
    x = rng.standard_normal((n, hidden)).astype(np.float32)
    weights = rng.random((n, k)).astype(np.float32)
    return mx.array(x), mx.array(ids.astype(np.uint32)), mx.array(weights)


def same_bits(a: mx.array, b: mx.array) -> bool:
    """Equal shape, dtype and bytes; both finite."""
    first, second = np.array(a), np.array(b)
    assert np.isfinite(first).all(), "not finite"
    return (first.shape, first.dtype) == (second.shape, second.dtype) and (
        first.tobytes() == second.tobytes()
    )


def bank_is_right(store, experts: Experts) -> bool:
    """Every expert that a streamed store believes resident is there, byte for byte."""
    for layer in LAYERS:
        for expert, slot in store.residents(layer).items():
            views = store._layers[layer].bank.slot_views(slot)
            if b"".join(views) != experts.block(layer, expert):
                return False
    return True


def arrive_at_random(store, experts: Experts, rounds: int = 20) -> None:
    """Read random experts in place of others; what the bank then holds is right."""
    rng = np.random.default_rng(0)
    for i in range(rounds):
        for layer in LAYERS:
            count = int(rng.integers(1, store.slots[layer] + 1))
            chosen = rng.choice(experts.num_experts, count, replace=False).tolist()
            assert store.read_missing(layer, chosen, protected=chosen)
            assert set(chosen) <= set(store.residents(layer))
        if i % 4 == 3:
            assert bank_is_right(store, experts)
    assert store.stats().total.evictions > rounds


def banks(model) -> list[int]:
    """Which arrays hold the experts; others would after a thread kept a result to itself."""
    model.runtime.start_eval()
    return [id(state.bank.arrays) for state in model.store._layers.values()]


class Wrapped:
    """A reader that runs `before` ahead of every read, in the reading thread."""

    name = "wrapped"

    def __init__(self, reader, before):
        self._reader, self._before = reader, before
        self.layers, self.num_experts = reader.layers, reader.num_experts
        self.layout, self.close = reader.layout, reader.close

    def read(self, layer, expert, into):
        result = self._before(layer, expert, into)
        return self._reader.read(layer, expert, into) if result is None else result


class EveryOther(TimedSwitch):
    """On in every other step, whatever it costs."""

    def step(self, pairs, cost):
        self.steps += 1
        self.on = self.steps % 2 == 1

    def disturb(self): ...


def prefetch_of(name):
    """The prefetcher of this name; one that decides by time decides by the number of the step."""
    prefetch = make_prefetch(name)
    if isinstance(prefetch, AutoLookAhead):
        prefetch.switch = EveryOther()
    return prefetch


# Calls that miss, hit, evict and sweep.
CALLS = [random_call(n, seed=seed) for seed, n in enumerate((1, 1, 2, 1, 20, 1, 12, 1, 1))]


def all_is_well(store, experts):
    """The tables agree with each other and the bank, and every call is right."""
    for state in store._layers.values():
        assert not state.change.open
        state.settle()
        assert state.table.free + len(state.table) == state.table.slots
    assert bank_is_right(store, experts)
    resident = experts.resident()
    for call in CALLS:
        assert same_bits(store.experts(3, *call), resident.experts(3, *call))
    assert bank_is_right(store, experts)

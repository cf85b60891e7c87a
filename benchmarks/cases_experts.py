"""Routed experts and decode matrices at the shapes of Qwen3.6-35B-A3B, for kernels.py.

256 experts of 512 x 2048, 8 a token. Routes and matrices rotate over more than 200 MB, so that no
weight is found in the cache. Experts are chained: each call continues the sum of the one before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import mlx.core as mx
import numpy as np

from mlx_moeflux.checkpoint.quantization import QuantSpec
from mlx_moeflux.kernels.expert_ffn import ExpertBank, ProjectionBank
from mlx_moeflux.kernels.expert_mix import expert_mix, expert_mix_grouped, expert_mix_pairs
from mlx_moeflux.kernels.project import Weight, project, project_fused

E, K, C, F, GROUP = 256, 8, 2048, 512, 64
DTYPE = mx.bfloat16
ROTATED_BYTES = 200e6
STOCK = frozenset(("gather_qmm", "dequantise + gather_mm", "rms_norm + quantized_matmul"))
# Names of ExpertBank's parts with out and in widths.
SIZES = {"gate": (F, C), "up": (F, C), "down": (C, F)}

# One call: its number and the output of the call before -> its output.
Call = Callable[[int, "mx.array | None"], mx.array]


@dataclass(frozen=True)
class BenchmarkCase:
    """One operation at one size.

    forms: What is timed; those in STOCK are MLX's. ours: The form that "auto" takes. truth: Rows of
    the result and their values in float64.
    counts: Launches of the slope. moved, products: Bytes that must go through device memory, and
    multiply-adds. target: Microseconds.
    """

    name: str
    forms: dict[str, Call]
    ours: str
    truth: Callable[[], tuple[list[int], np.ndarray]]
    counts: tuple[int, int]
    moved: float
    products: float
    target: float | None = None


def random_bank(bits: int) -> ExpertBank:
    """Random experts; bits 0: unquantised."""
    mx.random.seed(bits)
    parts = {}
    for name, (out, width) in SIZES.items():
        weight = (mx.random.normal((E, out, width)) * width**-0.5).astype(DTYPE)
        if bits:
            stored = mx.quantize(weight, group_size=GROUP, bits=bits)
            parts[name] = ProjectionBank(*stored, QuantSpec(bits, GROUP))
        else:
            parts[name] = ProjectionBank(weight, None, None, None)
        mx.eval([a for a in (parts[name].weight, parts[name].scales) if a is not None])
    return ExpertBank(**parts)


def routes(tokens: int, count: int) -> list[tuple[mx.array, mx.array]]:
    """Slots ``[N, K]``, ascending, and weights; those of few tokens take turns among experts."""
    rng = np.random.default_rng(tokens)
    found = []
    for _ in range(count):
        slots = np.argsort(rng.random((tokens, E)), axis=-1)[:, :K]
        weights = rng.random((tokens, K)).astype(np.float32)
        found.append((mx.array(np.sort(slots).astype(np.uint32)), mx.array(weights)))
    mx.eval(found)
    return found


def dequantise_and_gather(x, slots, weights, bank, *, initial=None) -> mx.array:
    """Every expert in bf16 first, then sorted `gather_mm`: the best composition of stock MLX."""
    dense = [
        p.weight
        if p.spec is None
        else mx.dequantize(p.weight, p.scales, p.biases, group_size=GROUP, bits=p.spec.bits)
        for p in (bank.gate, bank.up, bank.down)
    ]
    order = mx.argsort(slots.reshape(-1))
    chosen = slots.reshape(-1)[order]

    def product(rows, matrix):
        return mx.gather_mm(
            rows[:, None], matrix.swapaxes(-1, -2), rhs_indices=chosen, sorted_indices=True
        )[:, 0]

    rows = x[order // K]
    gate, up = product(rows, dense[0]), product(rows, dense[1])
    out = product(gate * mx.sigmoid(gate) * up, dense[2])[mx.argsort(order)]
    y = (out.reshape(*slots.shape, C).astype(mx.float32) * weights[..., None]).sum(1)
    return y if initial is None else y + initial


def expert_case(bank: ExpertBank, tokens: int, target: float | None) -> BenchmarkCase:
    """Gate, up, SwiGLU, down and combine of `tokens` tokens."""
    rotated = routes(tokens, 32 if tokens <= 4 else 4)
    x = mx.random.normal((tokens, C), key=mx.random.key(tokens)).astype(DTYPE)
    mx.eval(x)

    def call(form) -> Call:
        return lambda i, before: form(x, *rotated[i % len(rotated)], bank, initial=before)

    def truth() -> tuple[list[int], np.ndarray]:
        rows = sorted({0, tokens // 2, tokens - 1})
        slots, weights = rotated[0]
        return rows, np.stack([_expert_row(x[n], slots[n], weights[n], bank) for n in rows])

    forms = {}
    if tokens <= 64:
        forms["pairs"] = call(expert_mix_pairs)
    if tokens > 1:
        forms["grouped"] = call(expert_mix_grouped)
    if tokens <= 64:
        forms["gather_qmm"] = call(expert_mix)
    else:
        forms["dequantise + gather_mm"] = call(dequantise_and_gather)
    distinct = np.unique(np.array(rotated[0][0])).size
    stored = sum(a.nbytes for p in _parts(bank) for a in (p.weight, p.scales, p.biases) if _is(a))
    bits = bank.gate.spec.bits if bank.gate.spec else 16
    return BenchmarkCase(
        f"experts {bits}-bit T={tokens}",
        forms,
        "pairs" if tokens <= 16 else "grouped",
        truth,
        (50, 250) if tokens == 1 else (10, 40) if tokens <= 64 else (2, 8),
        stored * distinct / E + tokens * C * 6,
        tokens * K * 3 * C * F,
        target,
    )


def matvec_case(name: str, parts: list[tuple[int, int]], target: float | None) -> BenchmarkCase:
    """Norm and matrices, (rows, bits) each, of one token."""
    mx.random.seed(1)
    one = sum(out * C * bits / 8 for out, bits in parts)
    rotated = []
    for _ in range(max(2, round(ROTATED_BYTES / one))):
        weights = []
        for out, bits in parts:
            weight = (mx.random.normal((out, C)) * C**-0.5).astype(DTYPE)
            stored = mx.quantize(weight, group_size=GROUP, bits=bits)
            weights.append(Weight(*stored, QuantSpec(bits, GROUP)))
            mx.eval(stored)
        rotated.append(weights)
    x, norm = mx.random.normal((1, C)).astype(DTYPE), mx.random.normal((C,)).astype(DTYPE)
    mx.eval(x, norm)

    def call(form) -> Call:
        return lambda i, before: form(x, rotated[i % len(rotated)], norm=norm)[0]

    def truth() -> tuple[list[int], np.ndarray]:
        row = _numpy(x)
        row = row / np.sqrt((row**2).mean() + 1e-6) * _numpy(norm)
        return [0], row @ _dense(rotated[0][0]).T

    forms = {"fused": call(project_fused), "rms_norm + quantized_matmul": call(project)}
    moved = one + 4 * sum(out * C // GROUP for out, _ in parts)
    products = sum(out * C for out, _ in parts)
    return BenchmarkCase(name, forms, "fused", truth, (100, 400), moved, products, target)


def cases(wanted: Callable[[str, float | None], bool]) -> list[BenchmarkCase]:
    """The targets first; wanted: Name and target -> whether a case is made."""
    found = []
    plans = {4: {1: 20, 4: None, 16: None, 64: None, 512: 1000, 2048: 2000, 8192: 6000}}
    plans |= {8: {1: None, 2048: None}, 2: {1: None, 2048: None}, 0: {1: None, 2048: None}}
    for bits, by_tokens in plans.items():
        named = {
            t: target
            for t, target in by_tokens.items()
            if wanted(f"experts {bits or 16}-bit T={t}", target)
        }
        if named:
            bank = random_bank(bits)
            found += [expert_case(bank, tokens, target) for tokens, target in named.items()]
    matrices = {"matvec 2048 -> 12352": ([(12352, 4)], 6), "matvec 512": ([(512, 4)], None)}
    matrices["matvec 8192 + 4096 + 2 x 64"] = ([(8192, 4), (4096, 4), (64, 8), (64, 8)], None)
    for name, (parts, target) in matrices.items():
        if wanted(name, target):
            found.append(matvec_case(name, parts, target))
    return found


def calls(call: Call) -> Callable[[int], list[mx.array]]:
    """n -> so many calls, each given what the one before it returned."""

    def made(n: int) -> list[mx.array]:
        outputs, before = [], None
        for i in range(n):
            before = call(i, before)
            outputs.append(before)
        return outputs

    return made


def error(call: Call, case: BenchmarkCase) -> float:
    """Largest difference from the truth, relative to its largest value."""
    rows, truth = case.truth()
    return float(np.abs(_numpy(call(0, None))[rows] - truth).max() / np.abs(truth).max())


def _parts(bank: ExpertBank) -> tuple[ProjectionBank, ...]:
    return bank.gate, bank.up, bank.down


def _is(array: mx.array | None) -> bool:
    return array is not None


def _numpy(array: mx.array) -> np.ndarray:
    return np.array(array.astype(mx.float32)).astype(np.float64)


def _dense(stored: Weight | ProjectionBank, slot: int | None = None) -> np.ndarray:
    """The values of a matrix, of one slot of several."""
    weight, scales, biases = (
        a if a is None or slot is None else a[slot]
        for a in (stored.weight, stored.scales, stored.biases)
    )
    if stored.spec is None:
        return _numpy(weight)
    bits = stored.spec.bits
    words = np.array(weight)[..., None] >> (np.arange(32 // bits, dtype=np.uint32) * bits)
    numbers = (words & ((1 << bits) - 1)).reshape(len(words), -1)
    scales, biases = (np.repeat(_numpy(a), GROUP, -1) for a in (scales, biases))
    return numbers * scales + biases


def _expert_row(x: mx.array, slots: mx.array, weights: mx.array, bank: ExpertBank) -> np.ndarray:
    row, total = _numpy(x), 0.0
    for slot, weight in zip(slots.tolist(), weights.tolist(), strict=True):
        gate, up, down = (_dense(p, slot) for p in _parts(bank))
        a = gate @ row
        total = total + weight * (down @ (a / (1 + np.exp(-a)) * (up @ row)))
    return total

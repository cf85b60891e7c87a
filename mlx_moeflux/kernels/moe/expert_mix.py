"""The routed experts of every token, weighted and added.

    y[n] = initial[n] + sum_k weights[n, k] ffn(x[n]; slots[n, k])
    ffn(x; s) = down[s] act(gate[s] x, up[s] x), see :mod:`mlx_moeflux.kernels.moe.expert_ffn`

Shapes:
    x: ``[N, C]``; slots: ``[N, K]`` uint32, a number that no slot has, such as :data:`ABSENT`,
    where there is no expert (nothing is added for it, and nothing read); weights: ``[N, K]``
    float32; bank: the experts by slot; initial: ``[N, C]`` float32 or None.
    exchange: where other processes have experts too, and `initial` is None: takes the weighted
    outputs of this process's experts ``[N, K, C]`` float32, -0.0 for those of others, and returns
    all outputs.
    returns: ``[N, C]`` float32.

Terms are added in float32 in the order of k. In one implementation, what an expert gives a token
depends on nothing but the token's row and the expert's bytes; so a sum may be cut in k and
continued with `initial`, and tokens may be computed together or apart, without changing a bit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import mlx.core as mx

from mlx_moeflux.checkpoint.blocks import BLOCK_MODES
from mlx_moeflux.checkpoint.quantization import QuantSpec
from mlx_moeflux.kernels import examples
from mlx_moeflux.kernels.cpu import blas
from mlx_moeflux.kernels.examples import Arguments, Normal, Sizes
from mlx_moeflux.kernels.moe import expert_pairs, expert_rows, expert_tiles
from mlx_moeflux.kernels.moe.expert_ffn import (
    ExpertBank,
    ProjectionBank,
    accumulate_experts,
    add_outputs,
    expert_ffn,
)
from mlx_moeflux.kernels.moe.expert_pairs import checked, pair_bytes, readable
from mlx_moeflux.kernels.operation import Implementation, Operation
from mlx_moeflux.kernels.proof import Builder, Proof

ABSENT = 0xFFFFFFFF


def expert_mix(
    x: mx.array,
    slots: mx.array,
    weights: mx.array,
    bank: ExpertBank,
    *,
    initial: mx.array | None = None,
    exchange: Callable[[mx.array], mx.array] | None = None,
) -> mx.array:
    """The module's formula in plain MLX: every pair, then one sum."""
    N, K = slots.shape
    real = slots < bank.slots
    rows = expert_ffn(mx.repeat(x, K, axis=0), mx.where(real, slots, 0).reshape(-1), bank)
    rows = mx.where(real[..., None], rows.reshape(N, K, -1), mx.array(-0.0, rows.dtype))
    weights = mx.where(real, weights, 0.0)
    if exchange is not None:
        return add_outputs(exchange(rows.astype(mx.float32) * weights[..., None]))
    return accumulate_experts(rows, weights, initial)


def expert_mix_grouped(x, slots, weights, bank, *, initial=None, exchange=None) -> mx.array:
    """The module's formula for many tokens, in five launches: pairs are grouped by expert.

    Raises:
        ShapeError: Shapes or dtypes do not fit together.
        UnsupportedError: The kernels do not know this bank, there is an exchange, or no GPU.
    """
    expert_pairs.refuse_exchange("grouped", exchange)
    checked(x, slots, weights, bank, initial)
    return expert_tiles.grouped(x, slots, weights, bank, initial)


def expert_mix_in_tiles(x, slots, weights, bank, *, initial=None, exchange=None) -> mx.array:
    """The module's formula for prompts in stock MLX, which multiplies the rows of an expert
    together, by the matrix units of a GPU that has them.

    Raises:
        UnsupportedError: There is an exchange.
    """
    expert_pairs.refuse_exchange("in_tiles", exchange)
    N, K = slots.shape
    real = slots < bank.slots
    flat = mx.where(real, slots, bank.slots - 1).reshape(-1)
    order = mx.argsort(flat)
    x = x if bank.float_dtypes <= {x.dtype} else x.astype(mx.float32)
    rows = expert_ffn(x[order // K], flat[order], bank, in_tiles=True)[mx.argsort(order)]
    rows = mx.where(real[..., None], rows.reshape(N, K, -1), mx.array(-0.0, rows.dtype))
    return accumulate_experts(rows, mx.where(real, weights, 0.0), initial)


# Tokens of a prompt, at least; and pairs for each slot: with fewer MLX computes rows one by one.
LEAST_TOKENS, LEAST_PAIRS = 17, 4


def _takes_tiles(x, slots, weights, bank, **options) -> bool:
    """Return True for prompts of many rows for each slot, unless experts are in ggml's blocks."""
    (N, K), parts = weights.shape, (bank.gate, bank.up, bank.down)
    in_blocks = any(part.spec is not None and part.spec.block is not None for part in parts)
    return N >= LEAST_TOKENS and N * K // bank.slots >= LEAST_PAIRS and not in_blocks


@functools.lru_cache(maxsize=1)
def random_bank(s: Sizes, dtype: mx.Dtype) -> ExpertBank:
    """One for all calls, which differ in their routes."""
    shapes = ((s.F, s.C), (s.F, s.C), (s.C, s.F))
    parts = [examples.quantised(s, examples.normal(dtype), s.E, *shape) for shape in shapes]
    mx.eval(parts)
    gate, up, down = (ProjectionBank(*part, s.spec) for part in parts)
    return ExpertBank(gate, up, down)


def _routed(s: Sizes, n: int) -> tuple[mx.array, mx.array]:
    order = mx.argsort(mx.random.uniform(shape=(n, s.E), key=examples.fresh_key()), axis=-1)[
        :, : s.K
    ]
    slots = mx.sort(order, axis=-1).astype(mx.uint32)
    return slots, mx.random.uniform(shape=(n, s.K), key=examples.fresh_key())


def call_of_size(s: Sizes, n: int, x: Normal) -> Arguments:
    rows = x(n, s.C)
    return (rows, *_routed(s, n), random_bank(s, rows.dtype)), {}


def _example(s: Sizes, n: int, x: Normal) -> Arguments:
    return call_of_size(s, n, x)[0], {"initial": x(n, s.C, dtype=mx.float32)}


def _in_blocks(mode: str) -> Builder:
    """An example of experts in ggml's blocks, at least as wide as one."""

    def example(s: Sizes, n: int, x: Normal) -> Arguments:
        side = max(s.C, BLOCK_MODES[mode].elements)
        weights, spec = examples.in_blocks(mode, 3, s.E, side, side), QuantSpec.of_mode(mode)
        gate, up, down = (ProjectionBank(weight, None, None, spec) for weight in weights)
        call = (x(n, side), *_routed(s, n), ExpertBank(gate, up, down))
        return call, {"initial": x(n, side, dtype=mx.float32)}

    return example


EXPERT_MIX = Operation(
    name="expert_mix",
    reference=expert_mix,
    others={
        "pairs": Implementation(
            expert_pairs.expert_mix_pairs,
            kernels=expert_pairs.KERNELS,
            takes=expert_pairs.readable_in_pairs,
            pair_bytes=pair_bytes,
            exchanges=expert_pairs.exchanges,
            joins=True,
        ),
        "rows": Implementation(
            expert_rows.expert_mix_rows,
            kernels=expert_rows.KERNELS,
            takes=expert_pairs.readable_in_pairs,
            pair_bytes=pair_bytes,
        ),
        "grouped": Implementation(
            expert_mix_grouped,
            kernels=expert_tiles.KERNELS,
            takes=readable,
            pair_bytes=pair_bytes,
        ),
        "in_tiles": Implementation(expert_mix_in_tiles, takes=_takes_tiles, mixes_rows=True),
        "blas": Implementation(
            blas.expert_mix_blas,
            on_cpu=True,
            takes=blas.takes_bank,
            pair_bytes=blas.pair_bytes,
            adds=blas.add_experts,
            joins=True,
        ),
    },
    size=slice(0, 1),
    tokens=dict.fromkeys(("x", "slots", "weights", "initial"), 0),
    equal_rows=False,
    proof=Proof(
        example=_example,
        example_tokens=examples.N,
        workloads={"": call_of_size},
        forms={mode: _in_blocks(mode) for mode in BLOCK_MODES},
        by_rows=True,
        # Of experts in blocks, which the reference computes in float32, tiles round weights, inner
        # values and results to 16 bits: 0.6 of a unit in the last place, root mean square.
        floor=2.5,
    ),
)

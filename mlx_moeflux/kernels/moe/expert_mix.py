"""The routed experts of every token, weighted and added.

    y[n] = initial[n] + sum_k weights[n, k] ffn(x[n]; slots[n, k])
    ffn(x; s) = down[s] act(gate[s] x, up[s] x), see :mod:`mlx_moeflux.kernels.moe.expert_ffn`

Shapes:
    x: ``[N, C]``; slots: ``[N, K]`` uint32, a number that no slot has, such as :data:`ABSENT`,
    where there is no expert (nothing is added for it, and nothing read); weights: ``[N, K]``
    float32; bank: the experts by slot; initial: ``[N, C]`` float32 or None.
    returns: ``[N, C]`` float32.

Terms are added in float32 in the order of k. In one form, what an expert gives a token depends on
nothing but the token's row and the expert's bytes; so a sum may be cut in k and continued with
`initial`, and tokens may be computed together or apart, without changing a bit.
"""

from __future__ import annotations

import mlx.core as mx

from mlx_moeflux.kernels.moe import expert_tiles
from mlx_moeflux.kernels.moe.expert_ffn import ExpertBank, accumulate_experts, expert_ffn
from mlx_moeflux.kernels.moe.expert_pairs import checked, pair_bytes, readable
from mlx_moeflux.kernels.runtime.metal import launches

ABSENT = 0xFFFFFFFF


def expert_mix(
    x: mx.array,
    slots: mx.array,
    weights: mx.array,
    bank: ExpertBank,
    *,
    initial: mx.array | None = None,
) -> mx.array:
    """The module's formula in plain MLX: every pair, then one sum."""
    N, K = slots.shape
    real = slots < bank.slots
    rows = expert_ffn(mx.repeat(x, K, axis=0), mx.where(real, slots, 0).reshape(-1), bank)
    rows = mx.where(real[..., None], rows.reshape(N, K, -1), mx.array(-0.0, rows.dtype))
    return accumulate_experts(rows, mx.where(real, weights, 0.0), initial)


def expert_mix_grouped(x, slots, weights, bank, *, initial=None) -> mx.array:
    """The module's formula for many tokens, in five launches: pairs are grouped by expert.

    Raises:
        ShapeError: Shapes or dtypes do not fit together.
        UnsupportedError: The kernels do not know this bank, or there is no GPU.
    """
    checked(x, slots, weights, bank, initial)
    return expert_tiles.grouped(x, slots, weights, bank, initial)


expert_mix_grouped.takes, expert_mix_grouped.pair_bytes = readable, pair_bytes
launches(*expert_tiles.KERNELS)(expert_mix_grouped)

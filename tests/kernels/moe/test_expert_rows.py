"""Experts in eights of pairs against float64 loops, and bit for bit against themselves cut
otherwise."""

from __future__ import annotations

import functools
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.kernels.moe import expert_rows
from mlx_moeflux.kernels.moe.expert_mix import ABSENT, expert_mix_grouped
from mlx_moeflux.kernels.moe.expert_pairs import expert_mix_pairs
from mlx_moeflux.kernels.moe.expert_rows import expert_mix_rows
from tests.kernels.experts import BETWEEN, mix, random_array
from tests.kernels.harness import Case, error, patched
from tests.kernels.moe.test_expert_mix import case

# tokens, K, slots, C, F, bits, group, dtype, bits of down
SIZES = [
    (5, 3, 4, 96, 64, 4, 32, mx.bfloat16, None),
    (13, 8, 11, 128, 64, 4, 64, mx.bfloat16, None),
    (21, 2, 3, 64, 192, 8, 64, mx.float16, 4),
    (9, 1, 2, 256, 128, 2, 128, mx.bfloat16, None),
    (7, 5, 6, 160, 32, 0, 32, mx.bfloat16, 8),
    (9, 2, 3, 96, 64, 4, 32, mx.bfloat16, None, False, "swiglu", mx.float16),
    (7, 2, 3, 96, 64, 0, 32, mx.float16, None, False, "swiglu", mx.float32),
]


@pytest.mark.parametrize(
    ("sizes", "absent"),
    [(sizes, 0.3 * (i % 2)) for i, sizes in enumerate(SIZES)],
    ids=["-".join(map(str, (*sizes[:7], *sizes[11:]))) for sizes in SIZES],
)
def test_agrees_with_float64(whole_device, sizes, absent):
    x, slots, weights, bank = case(*sizes, absent=absent)
    initial = random_array(np.random.default_rng(5), x.shape, mx.float32) if absent else None
    y = expert_mix_rows(x, slots, weights, bank, initial=initial)
    truth = mix(x, slots, weights, bank, initial)
    naive = np.abs(mix(x, slots, weights, bank, initial, rounded=x.dtype) - truth).max()
    assert y.dtype == mx.float32
    assert error(y, truth) <= 2 * naive


@pytest.mark.parametrize("sizes", SIZES[1:2], ids=lambda sizes: "-".join(map(str, sizes[:7])))
def test_tokens_together_or_apart_and_sums_cut_in_k_give_the_same_bits(whole_device, sizes):
    x, slots, weights, bank = case(*sizes)
    y = expert_mix_rows(x, slots, weights, bank)
    cut = sizes[0] // 3 + 1
    parts = [
        expert_mix_rows(x[part], slots[part], weights[part], bank)
        for part in (slice(cut), slice(cut, None))
    ]
    assert mx.array_equal(y, mx.concatenate(parts)).item()
    first = mx.arange(sizes[1]) < mx.array(
        np.random.default_rng(3).integers(0, sizes[1] + 1, (sizes[0], 1))
    )
    lower, upper = (mx.where(kept, slots, mx.array(ABSENT, mx.uint32)) for kept in (first, ~first))
    part = expert_mix_rows(x, lower, weights, bank)
    assert mx.array_equal(y, expert_mix_rows(x, upper, weights, bank, initial=part)).item()


@pytest.mark.parametrize(
    "sizes",
    [
        (3, 3, 5, 96, 64, 4, 32, mx.float32, None),
        (3, 1, 2, 96, 64, 2, 32, mx.bfloat16, None),
        (3, 2, 3, 96, 24, 0, 32, mx.bfloat16, None),
    ],
    ids=["float32", "no steps", "narrow floats"],
)
def test_what_it_does_not_take_goes_to_pairs(whole_device, sizes):
    arguments = case(*sizes)
    assert mx.array_equal(expert_mix_rows(*arguments), expert_mix_pairs(*arguments)).item()


def test_mxfp4_and_biases_go_in_larger_tiles(whole_device):
    arguments = case(9, 2, 3, 96, 64, "mxfp4", 32, mx.bfloat16, None, True, "clamped")
    assert mx.array_equal(expert_mix_rows(*arguments), expert_mix_grouped(*arguments)).item()


def small_case(sizes) -> Case:
    @functools.cache
    def drawn():
        return case(*sizes, absent=0.2)

    @functools.cache
    def truth():
        return mix(*drawn(), None)

    def limit():
        return 2 * np.abs(mix(*drawn(), None, rounded=drawn()[0].dtype) - truth()).max()

    name = "-".join(map(str, sizes[:6]))
    run = lambda: [expert_mix_rows(*drawn())]  # noqa: E731
    return Case(name, run, lambda: [truth()], functools.cache(limit), partly_written=BETWEEN)


NINTH, STEP = "a tile has eight rows: nobody's ninth", "widths are multiples of 32"
LISTED = "where tokens are is listed: neither is looked at"
EQUIVALENT = {
    "expert_rows.metal": {
        "expert_rows_inner: off by one < -> <= (2)": NINTH,
        "expert_rows_inner: off by one < -> <= (4)": STEP,
        "expert_rows_inner: swapped arguments 9 and 10 of multiply_tile": LISTED,
        "expert_rows_inner: swapped arguments 9 and 10 of multiply_tile (2)": LISTED,
        "expert_rows_outer: off by one < -> <=": NINTH,
        "expert_rows_outer: swapped parameters 8 and 9 of multiply_tile": "both are 0",
    },
}
# Rows in which each simdgroup has several steps.
WIDE = (9, 2, 2, 512, 512, 8, 64, mx.bfloat16, None)
CASES = {
    name: [small_case(sizes) for sizes in (SIZES[1], SIZES[3], WIDE, SIZES[5])]
    for name in ("expert_rows_inner", "expert_rows_outer")
}
# Fewer tiles than simdgroups.
two_tiles = functools.partial(patched, expert_rows, expert_rows._launch, OUTER_TILES=2)
CASES["expert_rows_outer"].append(replace(small_case(SIZES[3]), within=two_tiles))

"""Experts in blocks against loops in float64 with the `gguf` package's values, and bit for bit
against themselves cut otherwise."""

from __future__ import annotations

import functools
from dataclasses import replace
from itertools import product

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.checkpoint.blocks import BLOCK_MODES
from mlx_moeflux.checkpoint.quantization import QuantSpec
from mlx_moeflux.errors import ShapeError, UnsupportedError
from mlx_moeflux.kernels.moe import expert_tiles
from mlx_moeflux.kernels.moe.expert_ffn import ExpertBank, ProjectionBank
from mlx_moeflux.kernels.moe.expert_mix import ABSENT, EXPERT_MIX
from mlx_moeflux.kernels.moe.expert_pairs import pair_bytes
from mlx_moeflux.kernels.runtime.launcher import KERNELS
from tests.kernels.cases import PAST
from tests.kernels.experts import ACTIVATIONS, BETWEEN, mix, random_array, random_route
from tests.kernels.harness import Case, error, launched

gguf = pytest.importorskip("gguf")

from tests.kernels.linear.test_blocks import projection  # noqa: E402

PAIRS, GROUPED = (EXPERT_MIX.others[name] for name in ("pairs", "grouped"))

# modes of gate, up and down, tokens, K, slots, C, F, dtype of x, activation
SIZES = [
    ("q4_k", "q4_k", "q6_k", 2, 3, 4, 512, 256, mx.bfloat16),
    ("q4_0", "q4_0", "q4_0", 3, 2, 3, 96, 32, mx.float32, "geglu"),
    ("q4_1", "q4_1", "q4_1", 2, 4, 5, 32, 160, mx.float16),
    ("q5_0", "q5_0", "q5_0", 1, 1, 1, 64, 96, mx.float32),
    ("q5_1", "q5_1", "q5_1", 2, 2, 3, 288, 64, mx.bfloat16),
    ("q8_0", "q8_0", "q8_0", 2, 3, 4, 352, 288, mx.float32, "clamped"),
    ("q2_k", "q2_k", "q2_k", 2, 2, 3, 256, 768, mx.float32),
    ("q3_k", "q3_k", "q3_k", 1, 3, 4, 768, 256, mx.bfloat16),
    ("q5_k", "q5_k", "q5_k", 2, 2, 3, 256, 512, mx.float16),
    ("q6_k", "q6_k", "q6_k", 2, 2, 3, 1280, 256, mx.float32),
    ("iq4_nl", "iq4_nl", "iq4_nl", 2, 2, 3, 160, 544, mx.float32),
    ("iq4_xs", "iq4_xs", "iq4_xs", 2, 2, 3, 256, 256, mx.bfloat16),
    # Gate and up of several modes.
    ("q3_k", "q8_0", "iq4_nl", 2, 2, 3, 512, 96, mx.float32),
]
MANY = [(*sizes[:3], 19, *sizes[4:]) for sizes in SIZES]
FIRST, OTHERS = SIZES[:1], [pytest.param(s, marks=pytest.mark.slow) for s in SIZES[1:]]
FIRST_OF_MANY, OTHERS_OF_MANY = (
    MANY[:1],
    [pytest.param(s, marks=pytest.mark.slow) for s in MANY[1:]],
)


def name_of(sizes) -> str:
    return "-".join(map(str, sizes))


@functools.cache
def bank_of(gate, up, down, slots: int, C: int, F: int, activation: str = "swiglu") -> ExpertBank:
    kinds = ((gate, F, C), (up, F, C), (down, C, F))
    parts = (projection(mode, slots, out, width)[0] for mode, out, width in kinds)
    return ExpertBank(*parts, activation=ACTIVATIONS[activation])


def call(sizes, *, absent: float = 0.3):
    """x, slots, weights, bank and a sum to continue."""
    gate, up, down, tokens, K, slots, C, F, dtype, *activation = sizes
    rng = np.random.default_rng(tokens + C)
    route = random_route(rng, tokens=tokens, K=K, slots=slots, absent=absent)
    bank = bank_of(gate, up, down, slots, C, F, *activation)
    return (
        random_array(rng, (tokens, C), dtype),
        *route,
        bank,
        random_array(rng, (tokens, C), mx.float32),
    )


def check(implementation, sizes) -> None:
    x, slots, weights, bank, initial = call(sizes)
    assert implementation.takes(x, slots, weights, bank)
    y = implementation(x, slots, weights, bank, initial=initial)
    truth = mix(x, slots, weights, bank, initial)
    naive = np.abs(mix(x, slots, weights, bank, initial, rounded=x.dtype) - truth).max()
    assert y.dtype == mx.float32
    assert error(y, truth) <= 2 * naive


@pytest.mark.parametrize("sizes", [*FIRST, *OTHERS], ids=name_of)
def test_few_tokens(whole_device, sizes):
    with launched() as names:
        check(PAIRS, sizes)
    assert names == ["block_inner", "block_outer"]


@pytest.mark.parametrize("sizes", [*FIRST_OF_MANY, *OTHERS_OF_MANY], ids=name_of)
def test_many_tokens(whole_device, sizes):
    with launched() as names:
        check(GROUPED, sizes)
    tiles = ["block_tiles_gated", "block_tiles_down"]
    assert names == ["expert_lists", "expert_table", *tiles, "expert_combine"]


def test_dozens_of_tokens_go_in_tiles(whole_device):
    x, slots, weights, bank, _ = call(MANY[1])
    with launched() as names:
        y = EXPERT_MIX.others["rows"](x, slots, weights, bank)
    assert "block_tiles_gated" in names
    assert mx.array_equal(y, GROUPED(x, slots, weights, bank)).item()


BITS = [
    pytest.param(implementation, sizes, id=f"{name}-{sizes[0]}", marks=[pytest.mark.slow] * (i > 0))
    for name, implementation, every in (("pairs", PAIRS, SIZES), ("grouped", GROUPED, MANY))
    for i, sizes in enumerate((every[1], every[0], every[5], every[9], every[12]))
]


@pytest.mark.parametrize(("implementation", "sizes"), BITS)
def test_how_a_call_is_cut_changes_no_bit(whole_device, implementation, sizes):
    """Tokens together or apart, sums cut in k and continued, experts in other slots."""
    x, slots, weights, bank, _ = call(sizes)
    y = implementation(x, slots, weights, bank)
    for n in (0, len(x) - 1):
        alone = implementation(x[n : n + 1], slots[n : n + 1], weights[n : n + 1], bank)
        assert mx.array_equal(alone[0], y[n]).item()
    first = mx.arange(slots.shape[1]) < 1
    lower, upper = (mx.where(kept, slots, mx.array(ABSENT, mx.uint32)) for kept in (first, ~first))
    part = implementation(x, lower, weights, bank)
    assert mx.array_equal(implementation(x, upper, weights, bank, initial=part), y).item()
    where = np.random.default_rng(0).permutation(bank.slots + 2)[: bank.slots]

    def moved(part: ProjectionBank) -> ProjectionBank:
        new = np.full((bank.slots + 2, *part.weight.shape[1:]), 0xFF, np.uint8)  # NaN
        new[where] = np.array(part.weight)
        return replace(part, weight=mx.array(new))

    other = replace(bank, **{n: moved(getattr(bank, n)) for n in ("gate", "up", "down")})
    there = slots < bank.slots
    elsewhere = mx.where(
        there, mx.array(where.astype(np.uint32))[mx.where(there, slots, 0)], ABSENT
    )
    moved_y = implementation(x, elsewhere.astype(mx.uint32), weights, other)
    assert mx.array_equal(moved_y, y).item()


@pytest.mark.parametrize("implementation", [PAIRS, GROUPED], ids=["pairs", "grouped"])
def test_what_is_not_finite_stays_in_its_row(whole_device, implementation):
    x, slots, weights, bank, _ = call(SIZES[1] if implementation is PAIRS else MANY[1], absent=0)
    right = np.array(implementation(x, slots, weights, bank))
    numbers = np.array(x.astype(mx.float32))
    numbers[1, -1] = np.nan
    y = np.array(implementation(mx.array(numbers).astype(x.dtype), slots, weights, bank))
    assert np.array_equal(np.delete(y, 1, 0), np.delete(right, 1, 0))
    assert np.isnan(y[1]).all()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", [MANY[0], MANY[7], MANY[10]], ids=name_of)
def test_every_tile_gives_the_same_bits(whole_device, sizes, dtype):
    x, slots, weights, bank, _ = call(sizes)
    x, layout = x.astype(dtype), bank.layout
    tried = [
        (
            [tile for tile in gated if tile.fits(2, layout.inner, dtype)],
            [tile for tile in down if tile.fits(1, layout.down, dtype)],
        )
        for gated, down in expert_tiles.TILES.values()
    ]
    results = [
        expert_tiles.grouped(x, slots, weights, bank, None, tiles=tiles)
        for gated, down in tried
        for tiles in product(gated, down)
    ]
    assert len(results) >= 3
    assert all(mx.array_equal(results[0], other).item() for other in results[1:])


def test_what_they_do_not_read():
    x, slots, weights, bank, _ = call(SIZES[0])
    floats = ProjectionBank(mx.zeros((4, 512, 256)), None, None, None)
    affine = ProjectionBank(*mx.quantize(floats.weight, 64, 4), QuantSpec(4, 64))
    biased = {n: replace(getattr(bank, n), bias=mx.zeros((4, o))) for n, o in
              (("gate", 256), ("up", 256), ("down", 512))}  # fmt: skip
    for other, why in (
        (replace(bank, down=floats), "blocks beside blocks"),
        (replace(bank, down=affine), "blocks beside blocks"),
        (replace(bank, **biased), "without biases"),
        (replace(bank, activation=lambda gate, up: gate * up), "clamped form"),
    ):
        for implementation in (PAIRS, GROUPED):
            assert not implementation.takes(x, slots, weights, other)
            with pytest.raises(UnsupportedError, match=why):
                implementation(x, slots, weights, other)
    wrong = replace(bank.down, weight=bank.down.weight[..., 1:])
    fewer = replace(bank.down, weight=bank.down.weight[1:])
    for down, why in ((wrong, "no rows of 256"), (fewer, "not of one size")):
        with pytest.raises(ShapeError, match=why):
            PAIRS(x, slots, weights, replace(bank, down=down))
    with pytest.raises(ShapeError, match="x is"):
        PAIRS(x[:, 1:], slots, weights, bank)


def test_a_text_holds_no_other_types():
    kernel = KERNELS["block_outer"]
    text = "".join(kernel.using(E="q8_0").metal_text())
    assert "struct q8_0" in text
    assert "struct q4_0" not in text
    assert kernel.using(E="q8_0") is kernel.using(E="q8_0") is not kernel.using(E="q4_0")


def test_scratch_is_what_tiles_allocate():
    bank = call(SIZES[0])[3]
    assert pair_bytes(bank, mx.bfloat16) == 2 * (512 + 256) + 16


def test_every_mode_has_a_case():
    assert {mode for sizes in SIZES for mode in sizes[:3]} == set(BLOCK_MODES)


def case(sizes, tile: expert_tiles.Tile | None = None) -> Case:
    drawn = functools.cache(lambda: call(sizes))
    truth = functools.cache(lambda: mix(*drawn()))

    def run():
        *args, initial = drawn()
        if tile is None:
            return [PAIRS(*args, initial=initial)]
        return [expert_tiles.grouped(*args, initial, tiles=(tile, tile))]

    def limit():
        return 2 * np.abs(mix(*drawn(), rounded=drawn()[0].dtype) - truth()).max()

    return Case(name_of(sizes), run, lambda: [truth()], functools.cache(limit), BETWEEN)


FEW_CASES = [case(sizes) for sizes in SIZES]
# By default the first one alone.
SMALLER = ("q4_k", "q4_k", "q6_k", 11, 3, 4, 256, 256, mx.bfloat16)
MANY_CASES = [case(sizes, expert_tiles.SMALL) for sizes in (SMALLER, *MANY)]
POWERS = "powers of two"
COMMUTES, STEP, IDLE = "a product", "multiples of the step", "lanes without a unit add zero"
EQUIVALENT = {
    "blocks.metal": {
        "in_table: off by one < -> <=": "a shift by 32 or more, which adds nothing here",
        "in_table: off by one < -> + 1 <": STEP,
        "q6_k: off by one < -> <=": "a shift by nothing",
        "q6_k: off by one < -> + 1 <": STEP,
    },
    "block_rows.metal": {
        "add_eights: swapped arguments 1 and 2 of metal::fma": COMMUTES,
        "add_eights: swapped arguments 1 and 2 of metal::fma (2)": COMMUTES,
        "add_eights: swapped arguments 1 and 2 of metal::fma (3)": COMMUTES,
        "lanes_of: off by one > -> >=": IDLE,
        "lanes_of: off by one > -> >= (2)": IDLE,
        "block_totals: off by one < -> + 1 < (4)": POWERS,
        "folded: off by one < -> + 1 < (2)": POWERS,
        "folded: off by one < -> <=": PAST,
        "take_eights: off by one < -> + 1 < (2)": STEP,
    },
}
CASES = {
    "block_inner": FEW_CASES,
    "block_outer": FEW_CASES,
    "block_tiles_gated": MANY_CASES,
    "block_tiles_down": MANY_CASES,
}

"""Experts in blocks against float64 with the `gguf` package's values, and bit for bit against
themselves cut otherwise."""

from __future__ import annotations

import functools
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.checkpoint.blocks import BLOCK_MODES
from mlx_moeflux.checkpoint.quantization import QuantSpec
from mlx_moeflux.errors import ShapeError, UnsupportedError
from mlx_moeflux.kernels.moe import expert_blocks
from mlx_moeflux.kernels.moe.expert_blocks import form_of, gather_rows
from mlx_moeflux.kernels.moe.expert_ffn import ExpertBank, ProjectionBank
from mlx_moeflux.kernels.moe.expert_mix import ABSENT, EXPERT_MIX, expert_mix
from mlx_moeflux.kernels.moe.expert_pairs import expert_mix_pairs, pair_bytes
from tests.kernels.harness import Case, error, launched

gguf = pytest.importorskip("gguf")

from tests.kernels.linear.test_blocks import check, projection, rows_of  # noqa: E402

# mode or bits, slots, out, in, dtype of x, dtype of the scales of affine numbers
SIZES = [
    ("q2_k", 3, 37, 768, mx.float32),
    ("q3_k", 2, 9, 512, mx.bfloat16),
    ("q6_k", 3, 21, 512, mx.float16),
    ("iq4_nl", 4, 11, 352, mx.float32),
    ("iq4_xs", 2, 8, 768, mx.bfloat16),
    (5, 3, 13, 320, mx.float32, mx.float32),
    (3, 2, 7, 96, mx.bfloat16, mx.float16),
]
IDS = ["-".join(map(str, sizes[:4])) for sizes in SIZES]


@functools.cache
def matrix(kind, slots, out, width, x=None, dtype=None) -> tuple[ProjectionBank, np.ndarray]:
    """A bank, and its values."""
    if isinstance(kind, str):
        return projection(kind, slots, out, width)
    dense = mx.random.normal((slots, out, width), key=mx.random.key(out)) * width**-0.5
    weight, *scales = mx.quantize(dense, group_size=32, bits=kind)
    scales = [array.astype(dtype) for array in scales]
    values = mx.dequantize(weight, *(a.astype(mx.float32) for a in scales), 32, kind)
    return ProjectionBank(weight, *scales, QuantSpec(kind, 32)), np.array(values)


def product(x: mx.array, slots: np.ndarray, bank: ProjectionBank) -> mx.array:
    return gather_rows(x, mx.array(slots), bank, form_of(bank, x.shape[-1]))


def route(count: int, slots: int) -> np.ndarray:
    return np.random.default_rng(count).integers(0, slots, count).astype(np.uint32)


@pytest.mark.parametrize("sizes", SIZES, ids=IDS)
def test_products(device, sizes):
    bank, values = matrix(*sizes)
    x, slots = rows_of(5, sizes[3], sizes[4]), route(5, sizes[1])
    y = product(x, slots, bank)
    check(y, x, values, slots)
    # Alone, and in another slot of another bank.
    one = replace(bank, **{n: a[slots[3]][None] for n, a in vars(bank).items() if _is_stored(a)})
    other = replace(one, **{n: mx.repeat(a, 2, 0) for n, a in vars(one).items() if _is_stored(a)})
    assert mx.array_equal(product(x[3:4], np.ones(1, np.uint32), other)[0], y[3]).item()


def _is_stored(value: object) -> bool:
    return isinstance(value, mx.array)


def test_several_experts_share_a_row_and_absent_ones_give_zeros(device):
    bank, values = matrix(*SIZES[2])
    x, slots = rows_of(2, 512, mx.float32), np.array([0, ABSENT, 2, 2, 1, 3], np.uint32)
    y, there = product(x, slots, bank), slots < 3
    assert np.array_equal(np.array(y)[~there], np.zeros((2, 21)))
    check(y[mx.array([0, 2, 3, 4])], x[mx.array([0, 0, 1, 1])], values, slots[there])


def test_what_is_not_finite_stays_in_its_row(device):
    bank, _ = matrix(*SIZES[0])
    x, slots = np.array(rows_of(3, 768, mx.float32)), route(3, 3)
    right = np.array(product(mx.array(x), slots, bank))
    x[1, 700], x[2, 3] = np.nan, np.inf
    y = np.array(product(mx.array(x), slots, bank))
    assert np.array_equal(y[0], right[0])
    assert not np.isfinite(y[1:]).any()


def bank_of(gate, up, down, C: int, F: int) -> ExpertBank:
    kinds = ((gate, F, C), (up, F, C), (down, C, F))
    return ExpertBank(*(matrix(k, 4, out, width, None, mx.float32)[0] for k, out, width in kinds))


BANKS = {
    "Q4_K_M": bank_of(4, 4, "q6_k", 32, 256),
    "Q3_K_M": bank_of("q3_k", "q6_k", 5, 256, 32),
    "IQ4_NL": bank_of("iq4_nl", "iq4_nl", "iq4_nl", 32, 64),
}


def call(bank: ExpertBank, dtype: mx.Dtype = mx.float32) -> tuple[mx.array, ...]:
    slots = np.sort(np.stack([np.random.default_rng(i).permutation(4)[:3] for i in range(6)]))
    slots = slots.astype(np.uint32)
    slots[2, 2] = ABSENT
    weights = mx.random.uniform(shape=slots.shape, key=mx.random.key(1))
    return rows_of(6, bank.down.weight.shape[1], dtype), mx.array(slots), weights


@pytest.mark.parametrize(
    ("bank", "name"),
    [
        *(("IQ4_NL", name) for name in ("pairs", "rows", "grouped")),
        # These are other texts alone.
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (("Q4_K_M", "pairs"), ("Q3_K_M", "rows"))
        ),
    ],
)
def test_every_implementation_for_gpus_takes_them(device, bank, name):
    """Tokens together or apart, sums cut in k: the same bits."""
    bank, mix = BANKS[bank], EXPERT_MIX.others[name]
    x, slots, weights = call(bank)
    assert mix.takes(x, slots, weights, bank)
    with launched() as names:
        y = mix(x, slots, weights, bank)
    assert names == ["expert_blocks"] * 3 + ["expert_combine"]
    expected = expert_mix(x, slots, weights, bank)
    assert error(y, expected) <= 1e-5 * mx.abs(expected).max().item()
    for n in (1, 2):
        alone = mix(x[n : n + 1], slots[n : n + 1], weights[n : n + 1], bank)
        assert mx.array_equal(alone[0], y[n]).item()
    first = mx.array([[True, False, False]])
    lower, upper = (mx.where(kept, slots, mx.array(ABSENT, mx.uint32)) for kept in (first, ~first))
    part = mix(x, lower, weights, bank)
    assert mx.array_equal(mix(x, upper, weights, bank, initial=part), y).item()


def test_what_it_does_not_read():
    x, slots, weights = call(bank := BANKS["Q4_K_M"])
    pairs = EXPERT_MIX.others["pairs"]
    floats = replace(bank.up, weight=mx.zeros((4, 256, 32)), scales=None, biases=None, spec=None)
    for up in (floats, replace(bank.up, bias=mx.zeros((4, 256)))):
        other = replace(bank, up=up)
        assert not pairs.takes(x, slots, weights, other)
        with pytest.raises(UnsupportedError, match="take the reference"):
            expert_mix_pairs(x, slots, weights, other)
    for wrong in (
        replace(bank, down=replace(bank.down, weight=bank.down.weight[..., 1:])),
        replace(bank, up=replace(bank.up, scales=bank.up.scales[..., 1:])),
        replace(bank, down=replace(bank.down, weight=bank.down.weight[1:])),
    ):
        with pytest.raises(ShapeError, match=r"rows of 256|rows of 32|must be|not of one size"):
            expert_mix_pairs(x, slots, weights, wrong)
    with pytest.raises(ShapeError, match="x is"):
        expert_mix_pairs(x[:, 1:], slots, weights, bank)
    assert pair_bytes(bank, mx.bfloat16) == 4 * (3 * 256 + 32)


def test_kinds_are_affine_numbers_and_blocks():
    assert expert_blocks.KINDS[0] == "affine"
    assert set(expert_blocks.KINDS[1:]) <= set(BLOCK_MODES)


@pytest.mark.parametrize("mode", sorted(set(BLOCK_MODES) - set(expert_blocks.KINDS)))
def test_a_type_that_it_does_not_know_is_the_reference_s(mode):
    bank, _ = projection(mode, 4, 256, 256)
    with pytest.raises(UnsupportedError, match="take the reference"):
        form_of(bank, 256)


def case(sizes) -> Case:
    absent = sizes[1]  # the first number that no slot has
    x, slots = rows_of(2, sizes[3], sizes[4]), np.array([absent - 1, absent, 0, 1], np.uint32)

    def expected():
        _, values = matrix(*sizes)
        rows = np.array(x.astype(mx.float32)).astype(np.float64)[[0, 0, 1, 1]]
        chosen = values[np.where(slots == absent, 0, slots)].astype(np.float64)
        truth = np.einsum("pi,poi->po", rows, chosen)
        truth[1] = 0.0
        return [truth]

    run = lambda: [product(x, slots, matrix(*sizes)[0])]  # noqa: E731
    return Case("-".join(map(str, sizes[:4])), run, expected, 1e-5)


CASES = {"expert_blocks": [case(sizes) for sizes in SIZES]}

COMMUTES, PAST = "commutes", "past the end of a thread's array, and nothing reads it"
EQUIVALENT = {
    "expert_blocks.metal": {
        "affine: swapped arguments 1 and 2 of metal::fma": COMMUTES,
        "block_rows: off by one < -> + 1 < (3)": "widths are multiples of 8",
        "block_rows: swapped arguments 1 and 2 of metal::fma": COMMUTES,
        "q2_k: off by one < -> <=": PAST,
        "q2_k: swapped arguments 1 and 2 of metal::fma": COMMUTES,
        "q3_k: off by one < -> <=": PAST,
        "q6_k: off by one < -> <=": PAST,
    },
}

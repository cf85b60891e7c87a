"""The fused experts against loops in float64, and bit for bit against themselves cut otherwise."""

from __future__ import annotations

import functools
from itertools import product

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.errors import ShapeError, UnsupportedError
from mlx_moeflux.kernels.moe import expert_pairs as module
from mlx_moeflux.kernels.moe import expert_tiles
from mlx_moeflux.kernels.moe.expert_ffn import (
    ExpertBank,
    ProjectionBank,
    accumulate_experts,
)
from mlx_moeflux.kernels.moe.expert_mix import ABSENT, EXPERT_MIX, expert_mix, expert_mix_grouped
from mlx_moeflux.kernels.moe.expert_pairs import (
    columns_count,
    exchanges,
    expert_mix_pairs,
    pair_bytes,
)
from tests.kernels.cases import PAST
from tests.kernels.experts import BETWEEN, mix, random_array, random_bank, random_route
from tests.kernels.harness import Case, emulated, error, launched, patched, usually

IMPLEMENTATIONS = {name: EXPERT_MIX.others[name] for name in ("pairs", "grouped")}

# tokens, K, slots, C, F, bits, group, dtype, bits of down, biases, activation, dtype in the bank
SIZES = [
    (1, 8, 11, 128, 64, 4, 64, mx.bfloat16, None),
    (3, 3, 5, 96, 64, 4, 32, mx.float32, None),
    (2, 12, 17, 64, 192, 8, 64, mx.float16, 4),
    (2, 1, 3, 256, 128, 2, 128, mx.bfloat16, None),
    (16, 2, 4, 32, 96, 0, 32, mx.float32, None),
    (1, 5, 7, 160, 32, 0, 32, mx.bfloat16, 8),
    (17, 3, 5, 96, 64, 4, 32, mx.float32, None),
    (40, 1, 2, 128, 96, 4, 32, mx.bfloat16, None),
    (21, 16, 19, 64, 160, 8, 32, mx.bfloat16, 4),
    (33, 2, 9, 128, 128, 2, 64, mx.float16, None),
    (18, 3, 4, 32, 32, 0, 32, mx.bfloat16, 8),
    (70, 3, 3, 64, 96, 0, 32, mx.float32, None),
    (2, 2, 3, 6176, 64, 4, 32, mx.bfloat16, None),
    (2, 2, 3, 6144, 256, 4, 32, mx.bfloat16, None),
    (3, 4, 6, 96, 64, "mxfp4", 32, mx.bfloat16, None, True, "clamped"),
    (2, 2, 3, 1120, 64, "mxfp4", 32, mx.float32, None, True, "clamped"),
    (2, 3, 5, 96, 64, 8, 32, mx.float16, "mxfp4", False, "clamped"),
    (21, 4, 6, 96, 160, "mxfp4", 32, mx.bfloat16, None, True, "clamped"),
    (40, 2, 3, 128, 64, "mxfp4", 32, mx.float32, 4, True, "swiglu"),
    (18, 2, 4, 64, 96, "mxfp4", 32, mx.float16, None),
    (2, 3, 5, 96, 64, 4, 32, mx.bfloat16, None, True, "clamped"),
    (18, 2, 4, 64, 96, 8, 32, mx.float16, None, True, "clamped"),
    (18, 2, 4, 64, 96, 4, 32, mx.float16, None, False, "clamped"),
    # Floats in rows of any multiple of 8.
    (2, 3, 4, 40, 24, 0, 32, mx.bfloat16, None),
    (21, 2, 3, 56, 8, 0, 32, mx.bfloat16, None),
    (19, 3, 4, 168, 104, 0, 32, mx.float32, None),
    (3, 2, 3, 1000, 24, 0, 32, mx.float16, 0, True, "clamped"),
    # A bank of another dtype than x.
    (2, 3, 4, 96, 64, 4, 32, mx.bfloat16, None, False, "swiglu", mx.float16),
    (18, 2, 4, 64, 96, 4, 32, mx.bfloat16, None, True, "swiglu", mx.float32),
    (17, 2, 3, 40, 24, 0, 32, mx.bfloat16, None, False, "swiglu", mx.float32),
    (2, 2, 3, 48, 16, 0, 32, mx.float32, None, False, "swiglu", mx.bfloat16),
    (19, 2, 3, 64, 32, 8, 32, mx.float32, 0, False, "swiglu", mx.float16),
    (2, 2, 3, 64, 32, 2, 32, mx.float16, 8, True, "clamped", mx.bfloat16),
    (2, 3, 5, 96, 64, 4, 32, mx.bfloat16, None, False, "geglu"),
    (19, 2, 4, 64, 96, 8, 32, mx.float32, 4, False, "geglu"),
    (17, 2, 3, 40, 24, 0, 32, mx.float16, None, True, "geglu"),
]
# The parts of the other sizes are those of these.
USUAL = {*range(4), *range(5, 8), 9, 10, 12, 14, 17, 23, 24, 27, 28, 29, 33, 34}


def slow(*sizes):
    """These sizes with -m slow only."""
    return usually(sizes, ())


def implementation_of(sizes):
    """The implementation for few tokens or the other."""
    return expert_mix_pairs if sizes[0] <= 16 else expert_mix_grouped


def case(
    tokens,
    K,
    slots,
    C,
    F,
    bits,
    group,
    dtype,
    down,
    biased=False,
    activation="swiglu",
    stored=None,
    *,
    absent=0.0,
):
    rng = np.random.default_rng(tokens + C)
    numbers = {"bits": bits, "group": group, "dtype": stored or dtype, "down": down}
    bank = random_bank(slots=slots, C=C, F=F, biased=biased, activation=activation, **numbers)
    x = random_array(rng, (tokens, C), dtype)
    return x, *random_route(rng, tokens=tokens, K=K, slots=slots, absent=absent), bank


@pytest.mark.parametrize(
    "sizes",
    usually(SIZES, USUAL),
    ids=lambda sizes: "-".join(map(str, (*sizes[:7], *sizes[11:]))),
)
@pytest.mark.parametrize("absent", [pytest.param(0.0, marks=pytest.mark.slow), 0.3])
def test_agrees_with_float64(whole_device, sizes, absent):
    x, slots, weights, bank = case(*sizes, absent=absent)
    initial = random_array(np.random.default_rng(5), x.shape, mx.float32) if absent else None
    y = implementation_of(sizes)(x, slots, weights, bank, initial=initial)
    truth = mix(x, slots, weights, bank, initial)
    naive = np.abs(mix(x, slots, weights, bank, initial, rounded=x.dtype) - truth).max()
    assert y.dtype == mx.float32
    assert error(y, truth) <= 2 * naive


@pytest.mark.parametrize("name", ["pairs", "rows", "grouped"])
@pytest.mark.parametrize(
    "sizes",
    [
        (2, 3, 5, 96, 64, 4, 32, mx.bfloat16, None),
        (2, 3, 5, 64, 192, 8, 64, mx.float16, 4, False, "clamped"),
        pytest.param((3, 2, 4, 512, 512, 8, 64, mx.bfloat16, None), marks=pytest.mark.slow),
        pytest.param((2, 2, 3, 6176, 64, 4, 32, mx.bfloat16, None), marks=pytest.mark.slow),
    ],
    ids=lambda sizes: "-".join(map(str, sizes[:7])),
)
def test_pairs_by_themselves_add_up_to_a_call(whole_device, sizes, name):
    """As several ranks compute them: one row and one column for each pair, or K columns where their
    number counts."""
    x, slots, weights, bank = case(*sizes, absent=0.3)
    compute, K = EXPERT_MIX.others[name].function, slots.shape[1]
    more = [(0, 0), (0, K - 1 if columns_count(bank) else 0)]
    alone = np.pad(np.array(slots).reshape(-1, 1), more, constant_values=ABSENT)
    share = np.pad(np.array(weights).reshape(-1, 1), more)
    terms = compute(mx.repeat(x, K, axis=0), mx.array(alone), mx.array(share), bank)
    terms = np.array(terms).reshape(*slots.shape, -1)
    total = functools.reduce(np.add, [terms[:, k] for k in range(K)])
    expected = np.array(compute(x, slots, weights, bank))
    assert np.isfinite(expected).all()
    assert np.array_equal(total.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize(
    "sizes", [SIZES[0], SIZES[14], *slow(SIZES[1], SIZES[4], SIZES[20], SIZES[33])]
)
def test_processes_that_exchange_outputs_have_the_bits_of_one(whole_device, sizes):
    x, slots, weights, bank = case(*sizes, absent=0.3)
    odd = np.array(slots) % 2 == 1
    seen = []

    def keep(own):
        seen.append(own)
        return own

    def add(own):
        assert own.shape == (*slots.shape, x.shape[1])
        for there, outputs in ((odd, own), (~odd, seen[0])):
            gone = np.array(outputs)[there]
            assert not gone.any()
            assert np.signbit(gone).all()
        return own + seen[0]

    assert exchanges(bank)
    for compute in (expert_mix_pairs, expert_mix):
        seen.clear()
        for there, exchange in ((odd, keep), (~odd, add)):
            own = mx.where(mx.array(there), slots, mx.array(ABSENT, mx.uint32))
            y = compute(x, own, weights, bank, exchange=exchange)
        assert mx.array_equal(y, compute(x, slots, weights, bank)).item()


def test_wide_experts_are_not_exchanged():
    args = case(*SIZES[12])
    assert not exchanges(args[-1])
    with emulated(name="cuda"), pytest.raises(UnsupportedError, match="exchanges no outputs"):
        expert_mix_pairs(*args, exchange=lambda own: own)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["metal", "cuda"])
def test_wide_experts_in_any_layout(name):
    """Two simdgroups for each of seven experts, or one of twice the columns."""
    sizes = 1, 7, 7, 128, 1088, 4, 64, mx.bfloat16, None
    caches = module._inner_launch, module._outer_launch
    with patched(module, *caches, WIDE_EXPERTS=128), emulated(name=name), launched() as names:
        test_agrees_with_float64("emulator", sizes, 0.0)
    assert names == ["expert_inner_wide", "expert_outer_wide"]


def test_more_experts_than_a_threadgroup_has_room_for():
    sizes = 2, 16, 17, 64, 192, 8, 64, mx.float16, 4
    x, slots, weights, bank = case(*sizes)
    with emulated(name="cuda"):
        test_agrees_with_float64("emulator", sizes, 0.0)
        assert EXPERT_MIX.others["pairs"].takes(x, slots, weights, bank)
    with emulated(name="metal"):
        assert not EXPERT_MIX.others["pairs"].takes(x, slots, weights, bank)
        assert not EXPERT_MIX.others["rows"].takes(x, slots, weights, bank)
        assert EXPERT_MIX.others["grouped"].takes(x, slots, weights, bank)
        with pytest.raises(UnsupportedError, match="no room for 16 experts"):
            expert_mix_pairs(x, slots, weights, bank)


@pytest.mark.parametrize("absent", [0.0, 0.3])
def test_reference_agrees_with_float64(absent):
    x, slots, weights, bank = case(*SIZES[1], absent=absent)
    initial = random_array(np.random.default_rng(5), x.shape, mx.float32) if absent else None
    y = expert_mix(x, slots, weights, bank, initial=initial)
    assert error(y, mix(x, slots, weights, bank, initial)) <= 1e-6


@pytest.mark.parametrize("sizes", [SIZES[0], SIZES[6], *slow(SIZES[7], SIZES[10], SIZES[17])])
def test_slots_change_no_bit(whole_device, sizes):
    """Which slot holds an expert, and how many there are, is not seen in the result."""
    x, slots, weights, bank = case(*sizes)
    y = implementation_of(sizes)(x, slots, weights, bank)
    where = np.random.default_rng(0).permutation(bank.slots + 3)[: bank.slots]

    def moved(p: ProjectionBank) -> ProjectionBank:
        def move(array):
            if array is None:
                return None
            new = np.zeros((bank.slots + 3, *array.shape[1:]), np.float32)
            if not mx.issubdtype(array.dtype, mx.floating):
                new = new.astype(np.uint32)
            new[where] = np.array(array.astype(mx.float32) if new.dtype == np.float32 else array)
            return mx.array(new).astype(array.dtype)

        return ProjectionBank(move(p.weight), move(p.scales), move(p.biases), p.spec, move(p.bias))

    banks = (moved(part) for part in (bank.gate, bank.up, bank.down))
    other = ExpertBank(*banks, activation=bank.activation)
    elsewhere = mx.array(where.astype(np.uint32))[slots]
    assert mx.array_equal(y, implementation_of(sizes)(x, elsewhere, weights, other)).item()


@pytest.mark.parametrize("sizes", [SIZES[1], SIZES[6], *slow(SIZES[7], SIZES[9], SIZES[12])])
def test_tokens_together_or_apart_give_the_same_bits(whole_device, sizes):
    x, slots, weights, bank = case(*sizes)
    tokens = x.shape[0]
    y = implementation_of(sizes)(x, slots, weights, bank)
    cut = tokens // 3 + 1
    parts = [
        implementation_of(sizes)(x[part], slots[part], weights[part], bank)
        for part in (slice(cut), slice(cut, None))
    ]
    assert mx.array_equal(y, mx.concatenate(parts)).item()


@pytest.mark.parametrize(
    "sizes",
    [
        SIZES[1],
        SIZES[6],
        *slow(SIZES[8], SIZES[12], SIZES[13]),
    ],
)
def test_a_sum_cut_in_k_gives_the_same_bits(whole_device, sizes):
    x, slots, weights, bank = case(*sizes)
    y = implementation_of(sizes)(x, slots, weights, bank)
    tokens, K = slots.shape
    first = mx.arange(K) < mx.array(np.random.default_rng(3).integers(0, K + 1, (tokens, 1)))
    lower = mx.where(first, slots, mx.array(ABSENT, mx.uint32))
    upper = mx.where(first, mx.array(ABSENT, mx.uint32), slots)
    part = implementation_of(sizes)(x, lower, weights, bank)
    assert mx.array_equal(y, implementation_of(sizes)(x, upper, weights, bank, initial=part)).item()


@pytest.mark.parametrize(
    "sizes", [SIZES[0], SIZES[6], *slow(SIZES[1], SIZES[8], SIZES[12], SIZES[13])]
)
def test_pairs_apart_give_the_same_bits(whole_device, sizes):
    """As several machines compute them: a row for each pair, whose other columns are absent."""
    x, slots, weights, bank = case(*sizes)
    N, K = slots.shape
    alone = mx.where(mx.arange(K) == 0, slots.reshape(-1, 1), mx.array(ABSENT, mx.uint32))
    apart = implementation_of(sizes)(mx.repeat(x, K, axis=0), alone, mx.ones(alone.shape), bank)
    together = accumulate_experts(apart.reshape(N, K, -1), weights)
    assert mx.array_equal(together, implementation_of(sizes)(x, slots, weights, bank)).item()


@pytest.mark.parametrize("sizes", [SIZES[7], *slow(SIZES[6], SIZES[9])])
def test_every_tile_gives_the_same_bits(whole_device, sizes):
    x, slots, weights, bank = case(*sizes)
    tried = [
        (
            [tile for tile in gated if tile.fits(2, bank.layout.inner, x.dtype)],
            [tile for tile in down if tile.fits(1, bank.layout.down, x.dtype)],
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


def test_tiles_suit_the_call_and_the_machine(whole_device):
    sizes = {"slots": 4, "C": 128, "F": 64, "bits": 4, "dtype": mx.bfloat16}
    wide = random_bank(**sizes, group=64).layout
    narrow = random_bank(**sizes, group=32).layout
    for pairs in (1, 4 * 12, 4 * 13, 4 * 128, 4 * 1000):
        for layout in (wide, narrow):
            for dtype in (mx.float32, mx.bfloat16):
                gated, down = expert_tiles.tiles_for(pairs, 4, layout, dtype)
                assert gated.BM == down.BM
                assert gated.fits(2, layout.inner, dtype)
                assert down.fits(1, layout.down, dtype)
    many = [expert_tiles.tiles_for(4 * n, 4, wide, mx.bfloat16)[0].BM for n in (1, 20, 100)]
    assert many == [16, 32, 64]


@pytest.mark.parametrize(
    ("tokens", "K", "slots", "absent"),
    [
        *((1, 1, 1, 0.0), (300, 3, 5, 0.2), (17, 16, 512, 0.0), (9, 4, 4, 1.0)),
        pytest.param(40, 2, 600, 0.5, marks=pytest.mark.slow),
    ],
)
def test_lists_of_pairs(whole_device, tokens, K, slots, absent):
    chosen, _ = random_route(
        np.random.default_rng(tokens), tokens=tokens, K=K, slots=slots, absent=absent
    )
    order, offsets = (np.array(a) for a in expert_tiles.list_pairs(chosen, slots))
    flat = np.array(chosen).reshape(-1)
    expected = [np.flatnonzero(flat == s) for s in range(slots)]
    assert offsets.tolist() == np.cumsum([0, *map(len, expected)]).tolist()
    assert order[: offsets[-1]].tolist() == np.concatenate(expected).tolist()

    rows = 16
    tiles = np.array(expert_tiles.list_tiles(mx.array(offsets), flat.size, rows)).tolist()
    wanted = [
        [s, int(offsets[s]) + i] for s in range(slots) for i in range(0, len(expected[s]), rows)
    ]
    assert tiles[: len(wanted)] == wanted
    assert all(tile == [ABSENT, 0] for tile in tiles[len(wanted) :])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS.values(), ids=IMPLEMENTATIONS)
@pytest.mark.parametrize("none", [ABSENT, 3])
def test_nobody_chosen(whole_device, implementation, none):
    x, slots, weights, bank = case(7, 2, 3, 64, 32, 4, 32, mx.float32, None)
    slots = mx.full(slots.shape, none, mx.uint32)
    y = implementation(x, slots, weights, bank)
    assert (np.array(y).view(np.uint32) == 0x80000000).all(), "-0.0 changes no sum"
    assert mx.array_equal(y, expert_mix(x, slots, weights, bank)).item()


def test_wrong_arguments():
    x, slots, weights, bank = case(*SIZES[1])
    for implementation, bad in product(
        IMPLEMENTATIONS.values(),
        (
            (x[:, :64], slots, weights),
            (x[:2], slots, weights),
            (x, slots.astype(mx.int32), weights),
            (x, slots, weights[:, :2]),
            (x.astype(mx.int32), slots, weights),
            (x, mx.zeros((3, 17), mx.uint32), mx.zeros((3, 17))),
        ),
    ):
        with pytest.raises(ShapeError):
            implementation(*bad, bank)
    with pytest.raises(ShapeError, match="initial"):
        expert_mix_pairs(x, slots, weights, bank, initial=x[:1])
    three = random_bank(slots=2, C=96, F=64, bits=3, group=32, dtype=mx.float32)
    with pytest.raises(UnsupportedError, match="affine"):
        expert_mix_grouped(x, slots, weights, three)
    eight = random_bank(slots=5, C=96, F=64, bits=8, group=32, dtype=mx.float32)
    assert not any(
        implementation.takes(x, slots, weights, three)
        for implementation in IMPLEMENTATIONS.values()
    )
    assert all(
        implementation.takes(x, slots, weights, bank) for implementation in IMPLEMENTATIONS.values()
    )
    with pytest.raises(UnsupportedError, match="gate and up"):
        expert_mix_pairs(x, slots, weights, ExpertBank(eight.gate, bank.up, bank.down))


def test_scratch_is_what_the_launches_allocate():
    *_, bank = case(*SIZES[7])
    assert pair_bytes(bank, mx.bfloat16) == 2 * (128 + 96) + 16


def mixed(sizes, *, absent=0.0, tile=None, exchanged=False) -> Case:
    """One of SIZES as a case; `tile` forces the grouped implementation. exchanged: With an exchange
    of outputs, which are results too."""

    @functools.cache
    def drawn():
        x, *others = case(*sizes, absent=absent)
        initial = random_array(np.random.default_rng(5), x.shape, mx.float32) if absent else None
        return x, *others, initial

    @functools.cache
    def truth():
        if exchanged:
            x, slots, weights, bank, _ = drawn()
            one, rows = (-1, 1), mx.repeat(x, slots.shape[1], axis=0)
            outputs = mix(rows, slots.reshape(one), weights.reshape(one), bank, None)
            return [mix(x, slots, weights, bank, None), outputs.reshape(*slots.shape, -1)]
        return [mix(*drawn())]

    def call():
        *args, initial = drawn()
        if exchanged:
            seen = []
            total = expert_mix_pairs(*args, exchange=lambda own: seen.append(own) or own)
            return [total, *seen]
        if tile is None:
            return [expert_mix_pairs(*args, initial=initial)]
        return [expert_tiles.grouped(*args, initial, tiles=(tile, tile))]

    def limit():
        *args, initial = drawn()
        initial = None if exchanged else initial
        return 2 * np.abs(mix(*args, initial, rounded=args[0].dtype) - truth()[0]).max()

    name = "{5}-bit-{0}x{1}".format(*sizes)
    return Case(name, call, truth, functools.cache(limit), BETWEEN if absent else ())


def listed() -> Case:
    chosen, _ = random_route(np.random.default_rng(1), tokens=331, K=3, slots=7)
    flat = np.array(chosen).reshape(-1)
    order = np.argsort(flat, kind="stable")
    offsets = np.searchsorted(flat[order], np.arange(8))
    return Case("lists", lambda: expert_tiles.list_pairs(chosen, 7), lambda: [order, offsets], 0.0)


def tabled() -> Case:
    counts = np.array([0, 17, 16, 0, 33, 1] + [3] * 251)  # one more than threads
    offsets = np.cumsum([0, *counts])
    table = [[s, offsets[s] + i] for s, n in enumerate(counts) for i in range(0, n, 16)]
    pairs = int(offsets[-1])
    empty = pairs // 16 + len(counts) - len(table)
    table = np.array(table + [[ABSENT, 0]] * empty)
    given = mx.array(offsets.astype(np.uint32))
    return Case("table", lambda: [expert_tiles.list_tiles(given, pairs, 16)], lambda: [table], 0.0)


BIASED_FEW = [mixed(SIZES[14], absent=0.3), mixed(SIZES[15]), mixed(SIZES[20])]
BIASED_MANY = [
    mixed(SIZES[17], absent=0.3, tile=expert_tiles.SMALL),
    mixed(SIZES[18], tile=expert_tiles.SMALL),
    mixed(SIZES[21], tile=expert_tiles.SMALL),
]
FEW = [
    mixed(SIZES[1], absent=0.3),
    mixed(SIZES[2], absent=0.3),
    mixed((2, 3, 4, 256, 256, 4, 64, mx.float32, None)),
    mixed(SIZES[5]),
    mixed(SIZES[16]),
    mixed(SIZES[23]),
    mixed(SIZES[27]),
    mixed(SIZES[33]),
]
MANY = [
    mixed(SIZES[6], absent=0.3, tile=expert_tiles.SMALL),
    mixed(SIZES[7], tile=expert_tiles.MIDDLE),
    mixed(SIZES[10], tile=expert_tiles.SMALL),
    mixed(SIZES[19], tile=expert_tiles.SMALL),
    mixed(SIZES[22], tile=expert_tiles.SMALL),
    mixed(SIZES[24], tile=expert_tiles.SMALL),
    mixed(SIZES[25], tile=expert_tiles.SMALL),
    mixed(SIZES[29], tile=expert_tiles.SMALL),
]
EXCHANGED = [
    mixed(SIZES[1], absent=0.3, exchanged=True),
    mixed(SIZES[4], exchanged=True),
    mixed((2, 3, 4, 160, 256, 4, 32, mx.float32, 0), exchanged=True),
]
BIASED_EXCHANGED = [mixed(SIZES[14], absent=0.3, exchanged=True), mixed(SIZES[20], exchanged=True)]
STEP = "both sides are multiples of the step"
SHARE = "a larger share: the last simdgroups have none"
PRODUCT, ZEROS = "a product", "both are 0"
EQUIVALENT = {
    "expert_tiles.metal": {
        "list_pairs: off by one < -> <= (5)": "one more step finds nobody",
        "list_tiles: off by one < -> <=": "one more step finds no slot",
        "affine_share: off by one < -> + 1 < (2)": STEP,
        "affine_share: off by one < -> + 1 < (4)": STEP,
        "spread: swapped arguments 1 and 2 of metal::fma": PRODUCT,
        "spread: off by one < -> <= (2)": PAST,
        "affine_share: off by one > -> >=": "the larger of equals",
        "affine_share: off by one < -> + 1 < (5)": STEP,
        "affine_share: off by one < -> + 1 < (7)": STEP,
        "expert_tile: off by one < -> <= (5)": "fills accumulators that are filled next",
        "expert_tile: off by one < -> + 1 < (6)": STEP,
        "expert_tile: off by one < -> + 1 < (8)": STEP,
        "expert_tile: off by one < -> <= (8)": "fetches once more, for nothing",
        "expert_tile: off by one < -> + 1 < (10)": STEP,
        "expert_tile: off by one < -> + 1 < (17)": STEP,
        "expert_tile: off by one < -> + 1 < (19)": STEP,
        "expert_tiles_down: swapped parameters 10 and 11 of expert_tile": ZEROS,
        "block_tiles_down: swapped parameters 10 and 11 of expert_tile": ZEROS,
        "block_share: off by one < -> + 1 < (2)": STEP,
        "block_share: off by one < -> + 1 < (4)": STEP,
        "block_share: off by one < -> + 1 < (5)": STEP,
        "block_share: off by one < -> + 1 < (6)": STEP,
        "block_share: swapped arguments 1 and 2 of metal::fma": PRODUCT,
        "combine_pairs: swapped arguments 1 and 2 of rounded_product": PRODUCT,
    },
    "quantised.metal": {
        "scaled: swapped arguments 1 and 2 of metal::fma": PRODUCT,
        "scaled: swapped arguments 1 and 2 of metal::fma (2)": PRODUCT,
        "stage: off by one < -> + 1 < (3)": STEP,
        "stage: off by one > -> >=": "the same values are read again",
        "stage: transposed index (3)": "Metal's factors are 1",
        "add_staged: off by one < -> + 1 <": STEP,
        "add_staged: off by one < -> + 1 < (3)": STEP,
        "add_staged: swapped arguments 1 and 2 of metal::fma": PRODUCT,
        "add_rows: swapped arguments 1 and 2 of metal::fma": PRODUCT,
        "load_x: off by one < -> <=": "the less of equals",
        "load_x: off by one < -> + 1 <": STEP,
        "load_x: off by one < -> + 1 < (2)": STEP,
        "fetch_narrow: swapped parameters 1 and 2 of narrow_steps": PRODUCT,
        "multiply_narrow: swapped parameters 1 and 2 of narrow_steps": PRODUCT,
        "load_x: off by one < -> + 1 < (4)": STEP,
        "take_columns: off by one < -> + 1 < (2)": STEP,
        "take_columns: off by one < -> + 1 < (3)": STEP,
        "part_of_rows: off by one < -> + 1 <": STEP,
        "part_of_rows: off by one < -> <=": "fetch_rows looks again",
        "part_of_rows: off by one < -> <= (4)": PAST,
    },
    "expert_pairs.metal": {
        "add_expert_rows: swapped arguments 1 and 2 of metal::fma (2)": PRODUCT,
        "add_expert_rows: swapped arguments 1 and 2 of metal::fma": PRODUCT,
        "inner_rows: off by one < -> + 1 < (3)": STEP,
        "outer_rows: off by one < -> + 1 < (2)": STEP,
        "inner_parts: swapped parameters 2 and 3 of share": SHARE,
        "outer_parts: swapped parameters 2 and 3 of share": SHARE,
        "outer_parts: swapped arguments 1 and 2 of rounded_product": PRODUCT,
        "take_dealt: off by one < -> + 1 < (2)": STEP,
        "take_dealt: off by one < -> + 1 < (3)": STEP,
    },
    "matvec.metal": {
        "rows_of: off by one < -> <= (2)": PAST,
        "rows_of: off by one < -> + 1 < (8)": STEP,
        "rows_of: swapped parameters 2 and 3 of share": PRODUCT,
        "inverse_norms: off by one < -> <=": PAST,
        "inverse_norms: off by one < -> <= (2)": PAST,
        "norm_row: off by one < -> + 1 < (3)": STEP,
        "norm_row: swapped parameters 2 and 3 of share": PRODUCT,
        "norm_row: swapped parameters 3 and 4 of take_columns": "Metal's factors are 1",
        "norm_row: swapped parameters 4 and 5 of take_columns": "both are 1",
    },
}
# Experts whose columns simdgroups share, the last share smaller or more than there are columns, or
# with inner values that are dealt out.
WIDE = [
    mixed((1, 2, 3, 6176, 32, 4, 32, mx.float32, None), absent=0.3),
    mixed((2, 3, 4, 6176, 96, 4, 32, mx.float32, None), absent=0.3),
    mixed((1, 1, 2, 6144, 1536, 8, 32, mx.float32, None)),
    mixed((1, 2, 3, 6144, 1440, 8, 32, mx.float32, None)),
]
CASES = {
    "expert_inner_wide": WIDE,
    "expert_outer_wide": WIDE,
    "expert_inner": FEW,
    "expert_outer": FEW,
    "expert_own": EXCHANGED,
    "expert_total": EXCHANGED,
    "expert_own_biased": BIASED_EXCHANGED,
    "expert_lists": [listed()],
    "expert_table": [tabled()],
    "expert_tiles_gated": MANY,
    "expert_tiles_down": MANY,
    "expert_combine": MANY,
    "expert_inner_biased": BIASED_FEW,
    "expert_outer_biased": BIASED_FEW,
    "expert_tiles_gated_biased": BIASED_MANY,
    "expert_tiles_down_biased": BIASED_MANY,
}

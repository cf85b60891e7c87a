"""Oracle: attention in float64 numpy loops; rows outside a sequence's range hold NaN."""

from __future__ import annotations

import functools
import re

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.errors import ShapeError
from mlx_moeflux.kernels.attention import plan
from mlx_moeflux.kernels.attention.attention import causal_sdpa, sdpa_fused
from mlx_moeflux.kernels.attention.plan import AttentionCall, plan_of
from mlx_moeflux.kernels.mla.latent_attention import latent_attention, latent_attention_fused
from mlx_moeflux.kernels.mla.latent_prefill import latent_prefill_expanded
from mlx_moeflux.kernels.runtime import pieces
from tests.kernels.harness import (
    Case,
    emulated,
    error,
    float64,
    launched,
    one_rounding,
    patched,
    require_gpu,
)
from tests.kernels.metal.emulator import Emulator

BF16, F16, F32 = mx.bfloat16, mx.float16, mx.float32


def truth(q, k, v, *, scale, causal, length, start, gate=None, sinks=None):
    q, k, v = float64(q), float64(k), float64(v)
    B, Hq, T, _ = q.shape
    y = np.zeros((B, Hq, T, v.shape[-1]))
    for b, h, t in np.ndindex(B, Hq, T):
        first, past = start[b], length[b] - T + t + 1 if causal else length[b]
        if past <= first:
            continue
        keys, values = (x[b, h * k.shape[1] // Hq, first:past] for x in (k, v))
        scores = keys @ q[b, h, t] * scale
        sink = -np.inf if sinks is None else float64(sinks)[h]
        top = max(scores.max(), sink)
        weights = np.exp(scores - top)
        y[b, h, t] = weights @ values / (weights.sum() + np.exp(sink - top))
    if gate is not None:
        y /= 1.0 + np.exp(-float64(gate)[..., -y.shape[-1] :].swapaxes(1, 2))
    return y


def naive(q, k, v, *, scale, causal, length, start, gate=None, sinks=None):
    """Matrix products of whole arrays in the dtype of q, on the CPU."""
    with mx.stream(mx.cpu):
        T, S = q.shape[2], k.shape[2]
        k, v = (mx.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
        key, past = mx.arange(S), mx.array(length)[:, None, None, None]
        seen = (key < past) & (key >= mx.array(start)[:, None, None, None])
        if causal:
            seen = seen & (key <= past - T + mx.arange(T)[:, None])
        scores = mx.where(seen, q @ k.swapaxes(-1, -2) * scale, mx.finfo(q.dtype).min)
        if sinks is not None:
            sink = mx.broadcast_to(sinks[:, None, None].astype(q.dtype), (*scores.shape[:3], 1))
            scores = mx.concatenate([scores, sink], axis=-1)
        weights = mx.softmax(scores, axis=-1)[..., :S]
        y = mx.where(seen.any(axis=-1, keepdims=True), weights @ v, 0.0)
        if gate is not None:
            y = y * mx.sigmoid(gate[..., -y.shape[-1] :].swapaxes(1, 2))
        mx.eval(y)
    return y.astype(q.dtype)


def poisoned(x, length, start):
    x = np.array(x.astype(F32))
    for b, (first, past) in enumerate(zip(start, length, strict=True)):
        x[b, :, :first] = x[b, :, past:] = np.nan
    return mx.array(x)


class Attended:
    """One random call of attention, its truth and the error that is allowed."""

    def __init__(
        self, dtype, B, Hq, Hkv, T, capacity, D, Dv, length, *, start=None, gate=0, causal=True,
        growing=False, sinks=None,
    ):  # fmt: skip
        mx.random.seed(B * T + capacity)
        draw = lambda *shape: mx.random.normal(shape).astype(dtype)  # noqa: E731
        q, k, v = draw(B, Hq, T, D), draw(B, Hkv, capacity, D), draw(B, Hkv, capacity, Dv)
        if growing:
            # Later keys weigh more: the running maximum rises by more than 2^8 at a time.
            k = (k * mx.linspace(0.1, 30.0, capacity)[:, None]).astype(dtype)
            # Neighbouring rows have maxima far apart.
            q = (q * mx.array([1.0, 50.0])[mx.arange(T) % 2][:, None]).astype(dtype)
        gate = draw(B, T, Hq, gate * Dv) if gate else None
        lengths = [length] * B if isinstance(length, int) else length
        starts = [0] * B if start is None else start
        sinks = None if sinks is None else mx.linspace(-3.0, 6.0, Hq).astype(sinks)
        self.given = {"length": lengths, "start": starts, "gate": gate, "causal": causal}
        self.given |= {"sinks": sinks, "scale": D**-0.5}
        self.arrays = q, *(poisoned(x, lengths, starts).astype(dtype) for x in (k, v))
        self.clean = q, k, v
        self.options = {
            "scale": D**-0.5,
            "mask": "causal" if causal else None,
            "length": length if isinstance(length, int) else mx.array(length),
            "start": None if start is None else mx.array(start),
            "gate": gate,
            "sinks": sinks,
        }

    @functools.cached_property
    def truth(self) -> np.ndarray:
        return truth(*self.clean, **self.given)

    @functools.cached_property
    def limit(self) -> float:
        off = error(naive(*self.clean, **self.given), self.truth)
        return 2 * max(off, one_rounding(self.truth, self.clean[0].dtype))

    def with_tail(self, rows: int):
        """The newest rows of every sequence apart, and NaN where they were."""
        length = self.options["length"]
        start = (length - 1) // rows * rows
        ends, buffers = [], []
        for x in self.arrays[1:]:
            end = np.full((*x.shape[:2], rows, x.shape[3]), np.nan, np.float32)
            whole = np.array(x.astype(F32))
            end[:, :, : length - start] = whole[:, :, start:length]
            whole[:, :, start:] = np.nan
            ends.append(mx.array(end).astype(x.dtype))
            buffers.append(mx.array(whole).astype(x.dtype))
        self.arrays = self.arrays[0], *buffers
        self.options |= {"tail": tuple(ends)}
        return self

    def apart(self):
        """The tokens as rows of one sequence, each of which has the bits of a call by itself."""
        q, *others = self.arrays
        length, gate, R = self.options["length"], self.options["gate"], q.shape[2]
        self.arrays = q.swapaxes(0, 2), *others
        self.options |= {"mask": None, "length": mx.arange(length - R + 1, length + 1)}
        self.options |= {"gate": None if gate is None else gate.swapaxes(0, 1)}
        self.limit, self.truth = self.limit, self.truth.swapaxes(0, 2)
        return self

    def one_by_one(self):
        """Results of the rows, a call each."""
        q, *others = self.arrays
        for r in range(len(q)):
            own = {n: self.options[n] for n in ("length", "gate") if self.options[n] is not None}
            own = {name: array[r : r + 1] for name, array in own.items()}
            yield sdpa_fused(q[r : r + 1], *others, **self.options | own)

    def case_of_bits(self, name):
        """Rows together against a call each."""
        apart = lambda: [float64(mx.concatenate(list(self.one_by_one())))]  # noqa: E731
        return Case(name, lambda: [sdpa_fused(*self.arrays, **self.options)], apart, 0.0)

    def case(self, name, **patches):
        return Case(name, lambda: [sdpa_fused(*self.arrays, **self.options)], lambda: [self.truth],
                    lambda: self.limit, within=lambda: constants(**patches))  # fmt: skip


def constants(**patches):
    """Other values of those that launches are laid out by."""
    return patched(plan, plan_of, **patches)


# Simdgroups take two tiles of rows each, and all keys.
TWO_TILES = {"ENOUGH_LARGE_GROUPS": 1, "MEMORY_ON_DEMAND": {"metal": 99 << 10, "cuda": 99 << 10}}
IN_ONE_PART = TWO_TILES | {"ENOUGH_GROUPS": 1}


def latent(name, dtype, B, H, T, capacity, R, P, length):
    mx.random.seed(T + capacity)
    draw = lambda *shape: mx.random.normal(shape).astype(dtype)  # noqa: E731
    q, q2 = draw(B, H, T, R), draw(B, H, T, P)
    k, k2 = draw(B, 1, capacity, R), draw(B, 1, capacity, P)
    both = mx.concatenate([q, q2], -1), mx.concatenate([k, k2], -1), k
    scale, lengths = (R + P) ** -0.5, [length] * B
    given = {"scale": scale, "causal": True, "length": lengths, "start": [0] * B}
    wanted = truth(*both, **given)
    limit = 2 * error(naive(*both, **given), wanted)
    k, k2 = (poisoned(x, lengths, [0] * B).astype(dtype) for x in (k, k2))
    options = {"scale": scale, "mask": "causal", "length": length}
    return Case(
        name, lambda: [latent_attention_fused(q, q2, k, k2, **options)], lambda: [wanted], limit
    )


def rotary(name, dtype, B, H, T, S, D, P, Dv, length, *, start=None, growing=False, **patches):
    """Keys [B, H, S, D] of each head beside those of width P that heads share."""
    mx.random.seed(T + S)
    draw = lambda *shape: mx.random.normal(shape).astype(dtype)  # noqa: E731
    q, q2, v = draw(B, H, T, D), draw(B, H, T, P), draw(B, H, S, Dv)
    k, k2 = draw(B, H, S, D), draw(B, 1, S, P)
    if growing:
        k, k2 = ((x * mx.linspace(0.1, 30.0, S)[:, None]).astype(dtype) for x in (k, k2))
    shared = mx.broadcast_to(k2, (B, H, S, P))
    both = mx.concatenate([q, q2], -1), mx.concatenate([k, shared], -1), v
    starts, scale = [0] * B if start is None else start, (D + P) ** -0.5
    given = {"scale": scale, "causal": True, "length": [length] * B, "start": starts}
    wanted = truth(*both, **given)
    limit = 2 * error(naive(*both, **given), wanted)
    k, k2, v = (poisoned(x, [length] * B, starts).astype(dtype) for x in (k, k2, v))
    options = {"scale": scale, "mask": "causal", "length": length}
    options["start"] = None if start is None else mx.array(start)
    options["expand"] = lambda rows, first, last: tuple(x[:, first:last, :length] for x in (k, v))
    latents = mx.zeros((B, 1, S, 16), dtype)
    # A head's second columns are not those that were turned: nobody reads them.
    lying = mx.concatenate([q, mx.full(q2.shape, mx.nan, dtype)], axis=-1).swapaxes(1, 2)
    call = functools.partial(latent_prefill_expanded, lying, q2, latents, k2, **options)
    return Case(
        name, lambda: [call()], lambda: [wanted], limit, within=lambda: constants(**patches)
    )


# One part; parts of two sizes, since 256 keys are four parts of a tile of 32 each until 128 are in
# use, the last row or the first alone; several parts of one size; two blocks of rows.
APART = (
    Attended(BF16, 1, 264, 2, 3, 64, 32, 32, 36, gate=2).with_tail(32).apart(),
    Attended(BF16, 1, 6, 2, 4, 256, 64, 96, 132, start=[3], gate=1).with_tail(64).apart(),
    Attended(F32, 1, 16, 2, 3, 256, 32, 32, 132, start=[2], sinks=F32, growing=True)
    .with_tail(64)
    .apart(),
    Attended(F16, 1, 6, 6, 2, 300, 64, 64, 77, start=[9]).with_tail(20).apart(),
    Attended(BF16, 1, 16, 1, 4, 192, 64, 64, 190, gate=2).with_tail(64).apart(),
)
# Every kernel alone; the joining launch comes with the calls over parts of the keys.
CASES = {
    "attend_rows": [
        rotary("columns that threads share", F16, 1, 3, 11, 64, 64, 48, 96, 63, growing=True),
        Attended(F16, 5, 30, 3, 9, 24, 32, 64, 23, gate=2).case("gate in second halves, 32/64"),
        Attended(F16, 2, 66, 3, 9, 140, 48, 32, [129, 140], start=[0, 135], growing=True).case(
            "heads fill the GPU, a tile of one key, queries without keys"
        ),
        rotary("columns of a thread", BF16, 2, 2, 9, 60, 64, 32, 64, 57, start=[0, 40]),
        rotary("few rows a tile", F16, 1, 2, 20, 50, 64, 16, 32, 49, MEMORY_ELSEWHERE=5 << 10),
        rotary("two tiles", BF16, 1, 2, 140, 200, 16, 16, 96, 199, start=[9], **IN_ONE_PART),
    ],
    "attend_rows_parts": [
        Attended(F16, 2, 2, 1, 70, 100, 48, 32, 100, causal=False).case("48/32, all visible"),
        Attended(F32, 1, 4, 2, 20, 130, 64, 64, [129], start=[45]).case("float32, padded left"),
        Attended(F16, 1, 2, 1, 150, 150, 32, 96, 150).case("two tiles", **TWO_TILES),
        rotary("float32", F32, 1, 2, 20, 130, 32, 32, 32, 129),
        rotary("16-bit", F16, 1, 2, 70, 300, 128, 64, 32, 300, growing=True),
    ],
    "attend_shared": [
        Attended(BF16, 1, 6, 2, 3, 60, 64, 32, 60).case("one part, 64/32"),
        Attended(F32, 1, 2, 1, 3, 40, 256, 256, 37).case("256: values come in parts"),
        Attended(F32, 2, 3, 3, 2, 64, 32, 64, [64, 33], start=[0, 32], growing=True).case(
            "tiles of one key, queries without keys"
        ),
        rotary("one row tile", F16, 4, 2, 3, 40, 48, 16, 32, 37, start=[0, 3, 35, 0]),
        rotary("values in parts", F32, 2, 2, 3, 33, 224, 32, 256, 33),
        rotary("two row tiles", F16, 1, 2, 20, 50, 128, 32, 128, 49),
        Attended(F32, 2, 6, 2, 3, 50, 256, 256, [41, 33], start=[0, 7], gate=1).case("256, f32"),
        Attended(BF16, 2, 6, 2, 3, 50, 64, 96, 50, gate=2, causal=False).case("64/96, second half"),
        Attended(F32, 1, 2, 1, 3, 50, 256, 256, 50, gate=2, causal=False).case("256, second half"),
        Attended(BF16, 1, 264, 2, 1, 64, 32, 32, 50, causal=False).with_tail(16).case("one part"),
        Attended(F16, 2, 6, 2, 1, 64, 64, 96, 50).with_tail(16).case("64/96, causal"),
        Attended(F16, 9, 30, 3, 1, 64, 64, 32, 64, causal=False, gate=2)
        .with_tail(64)
        .case("all gated"),
        Attended(BF16, 2, 6, 2, 1, 64, 64, 96, 50, gate=1).with_tail(16).case("64/96, gated"),
        latent("a tile of one key", BF16, 2, 4, 9, 50, 64, 32, 33),
        APART[0].case("rows apart, one part, a tile of one key"),
    ],
    "attend_shared_parts": [
        Attended(BF16, 2, 6, 2, 2, 130, 64, 96, 99).case("64/96"),
        Attended(F32, 1, 2, 1, 3, 130, 256, 256, 120).case("256: values come in parts"),
        Attended(F16, 2, 6, 2, 5, 130, 80, 32, 130, causal=False).case("80/32, all visible"),
        Attended(F32, 1, 16, 2, 6, 161, 32, 32, 161, growing=True).case("rows of four tiles"),
        rotary("one row tile", BF16, 2, 3, 5, 200, 64, 32, 64, 131),
        rotary("values in parts", F32, 1, 2, 3, 130, 224, 32, 256, 129),
        rotary("two row tiles", F16, 1, 2, 20, 130, 128, 32, 128, 129),
        Attended(BF16, 2, 6, 2, 1, 192, 64, 96, 99).with_tail(32).case("64/96, causal"),
        Attended(F32, 2, 4, 2, 1, 128, 64, 64, 65, causal=False, start=[3, 0])
        .with_tail(64)
        .case("a tail of one row, padded left"),
        latent("R 128", F16, 1, 40, 1, 80, 128, 64, 75),
        latent("whole tiles, a simdgroup with less", F16, 1, 32, 1, 80, 128, 32, 75),
        APART[1].case("rows apart, shared out in two ways"),
        APART[1].case_of_bits("rows apart, shared out in two ways, bits"),
    ],
    "attend_combine": [
        Attended(BF16, 1, 2, 2, 1, 300, 32, 32, 280).case("parts without keys"),
        Attended(F32, 2, 2, 2, 2, 600, 32, 32, 600, start=[0, 599], growing=True).case(
            "more parts than simdgroups, queries without keys"
        ),
        Attended(BF16, 1, 2, 1, 2, 192, 32, 128, 190).case("four columns a lane"),
        Attended(F16, 1, 1, 1, 1, 4224, 32, 32, 4200).case("more parts than come at once"),
        Attended(F16, 2, 6, 2, 2, 130, 32, 64, 130, gate=2, causal=False).case("gate"),
        Attended(BF16, 2, 6, 2, 3, 300, 64, 64, [280, 9], start=[0, 8], sinks=BF16).case("sinks"),
        Attended(F32, 1, 6, 2, 1, 40, 64, 128, 40, gate=1, causal=False, sinks=F16).case(
            "sinks of half, one part, gate"
        ),
    ],
}

PACKS = "columns are multiples of a pack"
STAGED = "a tile is staged that nobody reads"
ZEROS = "both are 0"
EQUIVALENT = {
    "attention.metal": {
        "stage: off by one < -> + 1 < (3)": PACKS,
        "stage: off by one < -> + 1 < (4)": PACKS,
        "raised: off by one > -> >=": "where a maximum rises is free",
        "add_parts: off by one < -> <=": "a round of parts that do not count",
        "add_parts: off by one > -> >=": "fetches again what is there",
    },
    "attention_rows.metal": {
        "attend_rows: off by one < -> <=": "queries are staged that nobody takes",
        "attend_rows: off by one < -> + 1 <": "a block of queries ends at a multiple of 16",
        "stage_rows: swapped parameters 7 and 8 of stage": ZEROS,
        "attend_rows: off by one < -> <= (3)": "a tile without keys adds nothing",
        "attend_rows: off by one > -> >= (3)": "keys are compared with their limit in vain",
        "attend_rows: off by one < -> <= (4)": STAGED,
        "stage_columns: off by one <= -> <": "a whole tile is taken for one that is not",
        "stage_columns: off by one >= -> >": "a whole tile is taken for one that is not",
        "attend_rows: swapped arguments 1 and 2 of metal::fma": "commutes",
        "attend_rows: off by one < -> + 1 < (2)": "multiples of 16",
        "attend_rows: swapped parameters 5 and 6 of stage_rows (2)": "both are 128",
        "attend_rows: swapped parameters 2 and 3 of stage_rows (4)": "the values are both "
        "inputs, and the other has no columns",
    },
    "attention_shared.metal": {
        "attend_shared: off by one < -> <=": "rows past the end are not written",
        "attend_shared: off by one < -> <= (4)": "the next tokens write the row again",
        "attend_shared: off by one < -> <= (14)": "the next tokens write the row again",
        "attend_shared: off by one < -> + 1 < (5)": PACKS,
        "attend_shared: off by one < -> + 1 < (6)": PACKS,
        "attend_shared: off by one <= -> <": "queries are staged that could be read where they are",
        "attend_shared: off by one < -> <= (7)": "a tile without keys adds nothing",
        "attend_shared: off by one < -> <= (11)": STAGED,
        "attend_shared: off by one < -> <= (12)": STAGED,
    },
}

SHAPES = {
    "decode 256": (BF16, 2, 8, 2, 1, 192, 256, 256, 150, {"gate": 2}),
    "prefill 256": (BF16, 1, 4, 2, 37, 128, 256, 256, 101, {"gate": 2}),
    "prefill 256 float32": (F32, 1, 2, 1, 19, 40, 256, 256, [37], {"start": [12]}),
    "prefill 192/128": (F16, 1, 2, 2, 70, 100, 192, 128, 99, {}),
    "prefill 128": (BF16, 1, 2, 1, 65, 90, 128, 128, 90, {}),
    "prefill 64": (F16, 1, 2, 1, 66, 70, 64, 64, 66, {"causal": False}),
    "8 tokens of 8 heads": (BF16, 1, 8, 1, 8, 70, 64, 64, 70, {}),
    "1 key": (F32, 1, 2, 1, 1, 5, 64, 64, 1, {}),
    "sinks": (F32, 2, 4, 2, 1, 70, 64, 64, 66, {"sinks": F32, "start": [0, 60]}),
    "sinks of a prompt": (BF16, 1, 4, 2, 20, 70, 64, 64, 66, {"sinks": F32}),
    "padding beyond the queries": (F32, 2, 2, 1, 12, 40, 64, 64, 20, {"start": [0, 15]}),
}


@pytest.mark.parametrize("tiles", ["metal", "cuda"])
@pytest.mark.parametrize("shape", SHAPES)
def test_sdpa(shape, tiles, monkeypatch):
    # The emulator has Metal's memory; CUDA's implementations are the same at smaller tiles.
    monkeypatch.setitem(plan.MEMORY, "cuda", plan.MEMORY_ELSEWHERE)
    plan_of.cache_clear()
    *sizes, options = SHAPES[shape]
    call = Attended(*sizes, **options)
    with emulated(name=tiles, schedules=(("reverse", 0),)):
        off = error(sdpa_fused(*call.arrays, **call.options), call.truth)
    plan_of.cache_clear()
    assert off <= call.limit


# The last piece is no multiple of anything. Of some calls each block of rows has parts of the keys.
IN_PIECES = {
    "256, gated": Attended(BF16, 1, 4, 2, 111, 150, 256, 256, 131, gate=2),
    "all visible": Attended(F16, 2, 6, 2, 133, 140, 64, 32, 139, causal=False, gate=1),
    "padded left": Attended(F32, 2, 2, 1, 97, 300, 64, 64, [293, 289], start=[50, 0]),
    "sinks": Attended(BF16, 1, 4, 2, 101, 110, 64, 64, 107, sinks=F32),
    "parts of 256": Attended(F32, 1, 2, 1, 99, 300, 256, 256, 299),
    "one part, 64": Attended(F16, 20, 8, 2, 99, 105, 64, 64, 99),
}


def whole_and_cut(call):
    """The result of a call and its launches, as a whole and in the smallest pieces."""
    results = []
    for most in (pieces.MOST_OPERATIONS, 1):
        cut = patched(pieces, MOST_OPERATIONS=most)
        with emulated(schedules=Emulator.FIRST), cut, launched() as names:
            results += [call(), names]
            mx.eval(results)
    return results


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * (i > 0)) for i, n in enumerate(IN_PIECES)],
)
def test_pieces_have_the_bits_of_the_whole_call(name):
    call = IN_PIECES[name]
    whole, once, cut, often = whole_and_cut(lambda: sdpa_fused(*call.arrays, **call.options))
    assert often == 2 * once
    assert mx.array_equal(cut, whole)


@pytest.mark.parametrize("kind", ["heads", "heads, two tiles", "latents"])
@pytest.mark.slow
def test_pieces_of_latent_attention_have_the_bits_of_the_whole_call(kind):
    if kind == "latents":
        case = latent("pieces", BF16, 2, 16, 67, 90, 64, 32, 81)
    elif kind == "heads":
        case = rotary("pieces", F16, 1, 3, 97, 150, 64, 32, 96, 131, start=[7], growing=True)
    else:
        case = rotary("pieces", BF16, 1, 2, 97, 150, 128, 64, 128, 149)
    whole, once, cut, often = whole_and_cut(lambda: case.call()[0])
    assert often == (67 if kind == "latents" else 2) * once
    assert mx.array_equal(cut, whole)


def test_latents_in_parts_of_keys_stay_whole():
    """Blocks of rows of all heads would share the keys out otherwise."""
    case = latent("parts", BF16, 2, 4, 27, 150, 64, 32, 131)
    _, once, _, often = whole_and_cut(lambda: case.call()[0])
    assert once == often == ["attend_shared_parts", "attend_combine"]


def test_rows_ask_for_the_memory_of_their_arrays():
    """What a launch on CUDA asks for is what the body declares."""
    declared = re.findall(r"threadgroup T \w+\[(.*)\];", plan._ROWS)
    python = [re.sub(r"(.*) \? (.*) : (.*)", r"(\2) if \1 else \3", size) for size in declared]
    for W, R, BN, D1, D2, DV in (
        (4, 1, 64, 64, 0, 96),
        (4, 2, 64, 128, 64, 128),
        (2, 2, 16, 48, 16, 32),
    ):
        sizes = {"W": W, "R": R, "BN": BN, "D1": D1, "D2": D2, "DV": DV}
        wanted = 2 * sum(eval(size, dict(sizes)) for size in python)
        assert plan._rows_memory(sizes | {"T": BF16}) == wanted


def test_many_rows_of_16_bits_take_two_tiles_for_each_simdgroup():
    def two(backend, T=3200, dtype=BF16, sizes=(128, 64, 128)):
        D, P, Dv = sizes
        q, v = (1, 16, T, D), (1, 16, T, Dv)
        call = AttentionCall("x", q, q, v, dtype, causal=True, beside=P)
        return plan_of(backend, call, QH=16).options["template"].get("R") == 2

    assert two("cuda")
    assert not two("metal")  # has no such memory
    assert not two("cuda", T=3199)
    assert not two("cuda", dtype=F32)
    assert not two("cuda", sizes=(128, 64, 160))
    assert not two("cuda", sizes=(256, 64, 128))


def test_values_never_lie_in_the_memory_of_narrower_keys():
    """Where both do not fit, values take the keys' place: rows as wide at most."""
    narrow = Attended(F32, 1, 2, 1, 20, 33, 192, 224, 33)
    with emulated(), pytest.raises(ShapeError, match="do not fit into"):
        sdpa_fused(*narrow.arrays, **narrow.options)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
def test_sdpa_on_the_gpu(shape, device):
    *sizes, options = SHAPES[shape]
    call = Attended(*sizes, **options)
    assert error(sdpa_fused(*call.arrays, **call.options), call.truth) <= call.limit


@pytest.mark.gpu
@pytest.mark.parametrize("constants_of", [TWO_TILES, IN_ONE_PART], ids=["parts", "whole"])
def test_two_tiles_of_rows_on_the_gpu(constants_of):
    """More threadgroup memory than a kernel may declare."""
    require_gpu()
    rotary("192/128", BF16, 1, 3, 300, 450, 128, 64, 128, 431, growing=True, **constants_of).check()
    call = Attended(F16, 2, 4, 2, 260, 300, 128, 128, [300, 277], start=[3, 40], causal=False)
    call.case("128/128", **constants_of).check()


@pytest.mark.parametrize("shape", SHAPES)
def test_reference(shape):
    *sizes, options = SHAPES[shape]
    call = Attended(*sizes, **options)
    y = causal_sdpa(*call.clean, **call.options)
    start, T, past = options.get("start"), sizes[4], sizes[8]
    if start is not None:
        # Queries that are padding see themselves; what comes out means nothing.
        past = [past] * len(start) if isinstance(past, int) else past
        real = np.array(past)[:, None] - T + np.arange(T) >= np.array(start)[:, None]
        y = mx.where(mx.array(real)[:, None, :, None], y, 0.0)
    assert error(y, call.truth) <= max(call.limit, 1e-6)


def test_latent_reference():
    q, q2 = mx.random.normal((2, 3, 5, 32)), mx.random.normal((2, 3, 5, 16))
    k, k2 = mx.random.normal((2, 1, 9, 32)), mx.random.normal((2, 1, 9, 16))
    y = latent_attention(q, q2, k, k2, scale=0.2, mask="causal", length=7)
    both = mx.concatenate([q, q2], -1), mx.concatenate([k, k2], -1), k
    assert error(y, truth(*both, scale=0.2, causal=True, length=[7, 7], start=[0, 0])) <= 1e-6


@pytest.mark.usefixtures("device")
def test_latent_attention_512_64():
    latent("512/64", BF16, 1, 8, 3, 80, 512, 64, 75).check()


def test_a_mask_that_is_an_array_goes_to_the_reference():
    q, k, v = (mx.random.normal((1, 2, 3, 64)) for _ in range(3))
    mask = mx.array([[[[True, False, True]] * 3]])
    assert (sdpa_fused(q, k, v, scale=1.0, mask=mask) == causal_sdpa(
        q, k, v, scale=1.0, mask=mask)).all()  # fmt: skip


BAD = {
    "multiples": ({"q": (1, 2, 3, 40), "k": (1, 2, 3, 40)}, {}),
    "fit together": ({"k": (1, 2, 4, 64)}, {}),
    "cast one": ({}, {"dtype": F16}),
    "positive": ({}, {"scale": 0.0}),
    "wide": ({}, {"gate": mx.zeros((1, 3, 2, 96))}),
    "threadgroup memory": ({"q": (1, 2, 3, 1024), "k": (1, 2, 3, 1024)}, {}),
}


@pytest.mark.parametrize("message", BAD)
def test_what_does_not_fit_is_refused(message):
    shapes, options = BAD[message]
    shapes = {"q": (1, 2, 3, 64), "k": (1, 2, 3, 64), "v": (1, 2, 3, 64)} | shapes
    q, k, v = (mx.zeros(shape) for shape in shapes.values())
    v = v.astype(options.pop("dtype", F32))
    with emulated(), pytest.raises(ShapeError, match=message):
        sdpa_fused(q, k, v, **{"scale": 1.0, "mask": None} | options)


@pytest.mark.parametrize("call", APART)
def test_rows_of_a_sequence_have_the_bits_of_a_call_each(device, call):
    together = sdpa_fused(*call.arrays, **call.options)
    apart = mx.concatenate(list(call.one_by_one()))
    assert mx.isfinite(apart).all().item()
    assert mx.array_equal(together, apart).item()
    assert error(together, call.truth) <= call.limit


def test_the_reference_takes_rows_of_a_sequence():
    call = APART[1]
    clean = {"tail": tuple(mx.where(mx.isnan(x), 0.0, x) for x in call.options["tail"])}
    q, *others = (mx.where(mx.isnan(x), 0.0, x) for x in call.arrays)
    assert error(causal_sdpa(q, *others, **call.options | clean), call.truth) <= 2 * call.limit


@pytest.mark.parametrize("attend", [causal_sdpa, sdpa_fused])
def test_keys_of_one_sequence_are_not_shared_by_several(attend):
    q, k, v = Attended(F32, 1, 4, 2, 1, 64, 32, 32, 40, causal=False).clean
    with emulated(), pytest.raises((ValueError, ShapeError)):
        mx.eval(attend(mx.concatenate([q, q]), k, v, scale=1.0, mask=None, length=40))


def test_the_reference_reads_the_tail():
    for dtype, length, rows in ((F32, 65, 64), (F32, 96, 32), (F32, 31, 16)):
        call = Attended(dtype, 2, 4, 2, 1, 128, 32, 64, length, causal=False).with_tail(rows)
        clean = [mx.where(mx.isnan(x), 0.0, x) for x in call.arrays]
        ends = tuple(mx.where(mx.isnan(x), 0.0, x) for x in call.options["tail"])
        for given in (length, mx.array([length, length])):
            options = call.options | {"tail": ends, "length": given}
            assert error(causal_sdpa(*clean, **options), call.truth) <= call.limit + 1e-6


def test_a_tail_that_cannot_be():
    call = Attended(F32, 1, 4, 2, 1, 128, 32, 64, 65, causal=False).with_tail(64)
    q, k, v = call.arrays
    keys, values = call.options["tail"]
    for options in (
        {"tail": (keys[:, :, :48], values[:, :, :48])},
        {"tail": (keys, values[..., :32])},
        {"tail": (keys.astype(F16), values)},
    ):
        with pytest.raises(ShapeError), emulated():
            sdpa_fused(q, k, v, **call.options | options)
    with pytest.raises(ShapeError, match="one token"), emulated():
        sdpa_fused(mx.concatenate([q, q], axis=2), k, v, **call.options)

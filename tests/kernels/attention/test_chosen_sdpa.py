"""Oracle: attention in float64 numpy over the columns that a token sees. All others hold NaN, so
that none of them is read."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.errors import ShapeError
from mlx_moeflux.kernels.attention.attention import causal_sdpa
from mlx_moeflux.kernels.attention.chosen_sdpa import chosen_sdpa, chosen_sdpa_fused
from tests.kernels.attention.test_attention import BF16, F16, F32, naive, truth
from tests.kernels.harness import Case, error, one_rounding


def gathered(x, columns):
    """The columns of each sequence, and zeros behind where one has fewer."""
    most = max(map(len, columns))
    rows = [np.pad(x[b][:, own], ((0, 0), (0, most - len(own)), (0, 0)))
            for b, own in enumerate(columns)]  # fmt: skip
    return np.stack(rows)


class Chosen:
    """One call with random blocks, its truth and the error that is allowed.

    most: Blocks that a sequence may see besides those that are not complete. rows: Of the tail.
    """

    def __init__(
        self, dtype, Hq, Hkv, D, Dv, *, length, ratio, most, start=(0,), capacity=192, rows=0,
        gate=0,
    ):  # fmt: skip
        rng, B = np.random.default_rng(length + ratio), len(start)
        draw = lambda *shape: mx.array(rng.normal(size=shape), dtype=dtype)  # noqa: E731
        q, k, v = draw(B, Hq, 1, D), draw(B, Hkv, capacity, D), draw(B, Hkv, capacity, Dv)
        gate = draw(B, 1, Hq, gate * Dv) if gate else None
        blocks, columns = [], []
        for first in start:
            complete = (length - first) // ratio
            own = np.sort(rng.permutation(complete)[:most])
            blocks.append([*own, *[complete] * (most + 1 - len(own))])
            tokens = (first + own[:, None] * ratio + np.arange(ratio)).ravel()
            columns.append([*tokens, *range(first + complete * ratio, length)])
        arrays = [np.array(x.astype(F32)) for x in (k, v)]
        seen = [mx.array(gathered(x, columns)).astype(dtype) for x in arrays]
        known = {"scale": D**-0.5, "causal": False, "length": [len(own) for own in columns]}
        known |= {"start": [0] * B, "gate": gate}
        self.truth = truth(q, *seen, **known)
        self.limit = 2 * max(
            error(naive(q, *seen, **known), self.truth), one_rounding(self.truth, dtype)
        )
        self.options = {"ratio": ratio, "scale": D**-0.5, "length": length, "gate": gate}
        self.options["start"] = mx.array(start, mx.int32) if any(start) else None
        kept, ends, newest = [], [], (length - 1) // max(rows, 1) * rows
        for x in arrays:
            whole = np.full_like(x, np.nan)
            for b, own in enumerate(columns):
                whole[b][:, own] = x[b][:, own]
            if rows:
                end = whole[:, :, newest : newest + rows].copy()
                whole[:, :, newest:] = np.nan
                ends.append(mx.array(end).astype(dtype))
            kept.append(mx.array(whole).astype(dtype))
        if rows:
            self.options |= {"tail": tuple(ends), "length": mx.array([length], mx.int32)}
        self.arrays = q, *kept, mx.array(np.array(blocks, np.int32))

    def clean(self):
        """The call without NaN: the reference copies what it masks."""
        q, k, v, blocks = self.arrays
        k, v = (mx.where(mx.isnan(x), 0.0, x) for x in (k, v))
        tail = self.options.get("tail")
        if tail is not None:
            tail = tuple(mx.where(mx.isnan(x), 0.0, x) for x in tail)
        return (q, k, v, blocks), self.options | {"tail": tail}

    def case(self, name):
        call = lambda: [chosen_sdpa_fused(*self.arrays, **self.options)]  # noqa: E731
        return Case(name, call, lambda: [self.truth], self.limit)


# Odd lengths of blocks, padding that is no multiple of them, all and few of them chosen, tokens
# behind the last complete block and none, groups of heads.
CALLS = {
    "parts": (BF16, 4, 2, 64, 32, {"length": 150, "ratio": 4, "most": 25}),
    "padded left": (F32, 6, 2, 48, 64, {"length": 100, "ratio": 3, "most": 9, "start": (7, 0, 61)}),
    "all there are": (F16, 4, 4, 32, 32, {"length": 23, "ratio": 4, "most": 5, "gate": 1}),
    "nothing behind": (F32, 8, 2, 64, 64, {"length": 120, "ratio": 5, "most": 2, "gate": 2}),
    "a tail": (BF16, 4, 2, 64, 64, {"length": 133, "ratio": 4, "most": 30, "rows": 64}),
    "tails, padded": (
        F32, 4, 2, 32, 64,
        {"length": 99, "ratio": 4, "most": 12, "rows": 32, "start": (8, 0, 93), "gate": 2},
    ),
    "before its first key": (
        F32, 2, 1, 32, 32, {"length": 34, "ratio": 4, "most": 3, "rows": 32, "start": (0, 33)},
    ),
    "blocks of one": (F16, 2, 1, 32, 32, {"length": 77, "ratio": 1, "most": 40}),
}  # fmt: skip


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("name", CALLS)
def test_it_reads_what_is_seen_and_nothing_else(name):
    *sizes, options = CALLS[name]
    call = Chosen(*sizes, **options)
    y = chosen_sdpa_fused(*call.arrays, **call.options)
    assert y.dtype == sizes[0]
    assert error(y, call.truth) <= call.limit


@pytest.mark.parametrize("name", CALLS)
def test_reference(name):
    *sizes, options = CALLS[name]
    call = Chosen(*sizes, **options)
    arrays, given = call.clean()
    assert error(chosen_sdpa(*arrays, **given), call.truth) <= call.limit + 1e-6


@pytest.mark.usefixtures("device")
def test_a_sequence_has_the_same_bits_beside_any_others():
    *sizes, options = CALLS["tails, padded"]
    call = Chosen(*sizes, **options)
    together = chosen_sdpa_fused(*call.arrays, **call.options)
    for b in range(3):
        own = [x[b : b + 1] for x in call.arrays]
        tail = tuple(x[b : b + 1] for x in call.options["tail"])
        one = {"tail": tail, "start": call.options["start"][b : b + 1]}
        one["gate"] = call.options["gate"][b : b + 1]
        y = chosen_sdpa_fused(*own, **call.options | one)
        assert mx.array_equal(y, together[b : b + 1])


def test_all_blocks_are_plain_attention():
    q, k, v = (mx.random.normal((1, 2, n, 32)) for n in (1, 40, 40))
    every = mx.array([[*range(10)]], mx.int32)
    y = chosen_sdpa(q, k, v, every, ratio=4, scale=0.2, length=38)
    assert error(y, causal_sdpa(q, k, v, scale=0.2, mask=None, length=38)) <= 1e-6


def test_what_does_not_fit_is_refused():
    *sizes, options = CALLS["a tail"]
    call = Chosen(*sizes, **options)
    q, k, v, blocks = call.arrays
    tail = call.options["tail"]
    for arrays, changed in (
        ((q, k, v, blocks.astype(mx.uint32)), {}),
        ((q, k, v, mx.concatenate([blocks, blocks])), {}),
        ((mx.concatenate([q, q], axis=2), k, v, blocks), {}),
        ((q, k[..., :40], v, blocks), {}),
        ((q, k, v.astype(F32), blocks), {}),
        ((q, k, v, blocks), {"tail": (tail[0][:, :, :40], tail[1][:, :, :40])}),
    ):
        with pytest.raises(ShapeError):
            chosen_sdpa_fused(*arrays, **call.options | changed)


CASES = {
    "attend_shared_parts": [
        Chosen(F32, 4, 2, 48, 32, length=99, ratio=3, most=22, start=(7, 0), rows=32).case("chosen")
    ],
    "attend_shared": [
        Chosen(
            F16, 96, 48, 48, 32, length=57, ratio=4, most=7, start=(2, 9, 0, 53, 1), capacity=64,
            rows=32,
        ).case("chosen"),
    ],
}  # fmt: skip

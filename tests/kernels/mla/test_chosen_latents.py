"""Oracle: attention in float64 numpy over the columns that a token sees. Rows that nobody sees are
NaN, of buffers and tails."""

from __future__ import annotations

import functools

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.errors import ShapeError
from mlx_moeflux.kernels.mla.chosen_latents import (
    chosen_latent_attention,
    chosen_latent_attention_fused,
)
from mlx_moeflux.kernels.mla.head_product import HeadMatrices
from mlx_moeflux.kernels.mla.latent_attention import latent_attention
from mlx_moeflux.kernels.mla.latent_values import takes_values
from tests.kernels.attention.test_attention import naive, truth
from tests.kernels.experts import dense, random_matrix
from tests.kernels.harness import Case, error, launched, one_rounding
from tests.kernels.mla.test_latent_token import laid_out_for_many, smaller, with_memory

BF16, F16, F32 = mx.bfloat16, mx.float16, mx.float32


class Chosen:
    """A random call and its truth. k: Positions of a token; rows: Of a tail, for one token."""

    def __init__(self, dtype, B, H, T, R, P, S, length, k, *, start=None, rows=0, values=0, loud=1):
        rng = np.random.default_rng(S + length)

        def draw(*shape):
            return mx.array(rng.normal(size=shape).astype(np.float32)).astype(dtype)

        q, q2 = loud * draw(B, H, T, R), loud * draw(B, H, T, P)
        c, r = draw(B, 1, S, R), draw(B, 1, S, P)
        first, scale = start or [0] * B, (R + P) ** -0.5
        positions = np.zeros((B, T, k), np.int32)
        self.truth = np.zeros((B, H, T, R))
        self.limit, seen = 0.0, np.zeros((B, S), bool)
        for b, t in np.ndindex(B, T):
            last = length - T + t
            columns = np.arange(min(first[b], last), last + 1)
            own = np.sort(rng.permutation(columns)[:k])
            positions[b, t] = [*own, *[last] * (k - len(own))]
            seen[b, own] = True
            one = (q[b : b + 1, :, t : t + 1], q2[b : b + 1, :, t : t + 1])
            rows_of = [x[b : b + 1][:, :, mx.array(own)] for x in (c, r)]
            both = mx.concatenate(one, -1), mx.concatenate(rows_of, -1), rows_of[0]
            given = {"scale": scale, "causal": False, "length": [len(own)], "start": [0]}
            exact = truth(*both, **given)
            off = max(error(naive(*both, **given), exact), one_rounding(exact, dtype))
            self.truth[b, :, t], self.limit = exact[0, :, 0], max(self.limit, 2 * off)
        self.options = {"length": length, "scale": scale}
        self.options["start"] = None if start is None else mx.array(start, mx.int32)
        if values:
            stored = random_matrix(rng, (H, values, R), bits=4, group=32, dtype=dtype)
            matrices = self.options["values"] = HeadMatrices(*stored, 0, values)
            exact = dense(matrices)
            # Latents are rounded before they go through a matrix.
            self.limit = max(
                (self.limit + one_rounding(self.truth, dtype)) * np.abs(exact).sum(-1).max(),
                one_rounding(self.truth @ exact.swapaxes(-1, -2), dtype),
            )
            self.truth = self.truth @ exact.swapaxes(-1, -2)
        arrays, ends, newest = [], [], (length - 1) // max(rows, 1) * rows
        for x in (c, r):
            whole = np.where(seen[:, None, :, None], np.array(x.astype(F32)), np.nan)
            if rows:
                ends.append(mx.array(whole[:, :, newest : newest + rows].copy()).astype(dtype))
                whole[:, :, newest:] = np.nan
            arrays.append(mx.array(whole).astype(dtype))
        if rows:
            self.options |= {"tail": tuple(ends), "length": mx.array([length], mx.int32)}
        self.arrays = q, q2, *arrays, mx.array(positions)

    def clean(self):
        """The call without NaN: the reference copies what it masks."""
        zero = lambda x: mx.where(mx.isnan(x), 0.0, x).astype(x.dtype)  # noqa: E731
        q, q2, c, r, positions = self.arrays
        options = dict(self.options)
        if "tail" in options:
            options["tail"] = tuple(map(zero, options["tail"]))
        return (q, q2, zero(c), zero(r), positions), options

    def case(self, name, **within):
        call = lambda: [chosen_latent_attention_fused(*self.arrays, **self.options)]  # noqa: E731
        return Case(name, call, lambda: [self.truth], self.limit, **within)


# dtype, B, H, T, R, P, S, length, k and more: odd lengths, padding, fewer positions than k, tails
# with few and many of the positions, several tokens, matrices of values.
CALLS = {
    "a tail": (BF16, 1, 16, 1, 128, 64, 192, 133, 90, {"rows": 64}),
    "padded": (F32, 3, 16, 1, 64, 16, 128, 100, 33, {"start": [0, 90, 98], "rows": 32}),
    "no tail": (F16, 2, 32, 1, 64, 32, 120, 77, 41, {}),
    "several tokens": (BF16, 2, 16, 5, 64, 16, 200, 150, 70, {"start": [0, 121]}),
    "through matrices": (F32, 2, 16, 2, 64, 32, 128, 90, 47, {"values": 32}),
    "through matrices, a tail": (
        BF16, 1, 32, 1, 128, 16, 256, 199, 130, {"rows": 64, "values": 64},
    ),
    "a first position": (F32, 1, 16, 1, 64, 16, 64, 1, 20, {"rows": 64}),
}  # fmt: skip


USUAL = ("a tail", "several tokens")


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n not in USUAL)) for n in CALLS]
)
def test_it_reads_what_is_seen_and_nothing_else(name):
    *sizes, options = CALLS[name]
    call = Chosen(*sizes, **options)
    y = chosen_latent_attention_fused(*call.arrays, **call.options)
    assert y.dtype == sizes[0]
    # Tiles of float32 lose 2^-20 of a product.
    assert error(y, call.truth) <= max(call.limit, 2**-20 * np.abs(call.truth).max())


@pytest.mark.parametrize("name", CALLS)
def test_reference(name):
    *sizes, options = CALLS[name]
    call = Chosen(*sizes, **options)
    arrays, given = call.clean()
    assert error(chosen_latent_attention(*arrays, **given), call.truth) <= call.limit + 1e-6


@pytest.mark.slow
@pytest.mark.usefixtures("device")
@pytest.mark.parametrize(
    "layout", [laid_out_for_many, lambda: with_memory(FEW=smaller(132))], ids=["many", "few"]
)
def test_layouts_for_more_memory(layout):
    call = Chosen(BF16, 2, 64, 1, 64, 16, 256, 250, 140, rows=64, start=[0, 200])
    with layout():
        y = chosen_latent_attention_fused(*call.arrays, **call.options)
    assert error(y, call.truth) <= call.limit


@pytest.mark.slow
@pytest.mark.usefixtures("device")
def test_a_token_has_the_same_bits_in_every_call():
    """Alone, beside other sequences and tokens, with a tail and without, in a larger buffer."""
    call = Chosen(BF16, 3, 16, 3, 64, 16, 256, 240, 100, start=[0, 30, 200])
    arrays, options = call.clean()
    together = chosen_latent_attention_fused(*arrays, **options)
    for b, t in np.ndindex(3, 3):
        own, length = slice(b, b + 1), 240 - 2 + t
        q, q2, positions = (
            arrays[0][own, :, t : t + 1], arrays[1][own, :, t : t + 1], arrays[4][own, t : t + 1]
        )  # fmt: skip
        c, r = (x[own] for x in arrays[2:4])
        given = options | {"start": options["start"][own], "length": mx.array([length], mx.int32)}
        newest = (length - 1) // 64 * 64
        given["tail"] = tuple(x[:, :, newest : newest + 64] for x in (c, r))
        more = [mx.pad(x, [(0, 0), (0, 0), (0, 64), (0, 0)]) for x in (c, r)]
        alone = chosen_latent_attention_fused(q, q2, *more, positions, **given)
        assert mx.array_equal(alone[0, :, 0], together[b, :, t])


def test_all_positions_are_plain_attention():
    q, q2, c, r = (mx.random.normal(s) for s in ((1, 4, 1, 32), (1, 4, 1, 8), (1, 1, 40, 32),
                                                 (1, 1, 40, 8)))  # fmt: skip
    options = {"length": 38, "scale": 0.2}
    y = chosen_latent_attention(q, q2, c, r, mx.arange(38)[None, None], **options)
    assert error(y, latent_attention(q, q2, c, r, mask=None, **options)) <= 1e-6


@pytest.mark.slow
@pytest.mark.usefixtures("device")
def test_it_is_two_launches():
    for name in ("a tail", "through matrices, a tail"):
        *sizes, options = CALLS[name]
        call = Chosen(*sizes, **options)
        with launched() as names:
            chosen_latent_attention_fused(*call.arrays, **call.options)
        last, values = ["attend_combine"], call.options.get("values")
        if values is not None:
            # The rows of CUDA are too long for matrices that are so small.
            one = takes_values(values, call.arrays[2].shape[-1])
            assert one or mx.cuda.is_available()
            last = ["attend_values"] if one else [*last, "head_narrow"]
        assert names == ["attend_chosen_latents", *last]


def test_what_does_not_fit_is_refused():
    *sizes, options = CALLS["a tail"]
    call = Chosen(*sizes, **options)
    q, q2, c, r, positions = call.arrays
    tail = call.options["tail"]
    for arrays, changed in (
        ((q, q2, c, r, positions.astype(mx.uint32)), {}),
        ((q, q2, c, r, mx.concatenate([positions, positions])), {}),
        ((q[:, :8], q2[:, :8], c, r, positions), {}),
        ((q, q2[..., :8], c, r[..., :8], positions), {"tail": (tail[0], tail[1][..., :8])}),
        ((q, q2, c, r[:, :, :64], positions), {}),
        ((q, q2, c.astype(F32), r, positions), {}),
        ((q, q2, c, r, positions), {"tail": (tail[0][:, :, :40], tail[1][:, :, :40])}),
        ((q, q2, c, r, positions), {"tail": (tail[0], tail[0])}),
    ):
        with pytest.raises(ShapeError):
            chosen_latent_attention_fused(*arrays, **call.options | changed)


CASES = {
    "attend_chosen_latents": [
        Chosen(F32, 3, 16, 1, 64, 16, 128, 100, 33, start=[0, 90, 98], rows=32, loud=9).case(
            "padded"
        ),
        Chosen(BF16, 2, 16, 5, 64, 64, 200, 150, 70, start=[0, 121], loud=9).case("several tokens"),
        Chosen(F16, 2, 64, 1, 64, 16, 256, 250, 140, start=[0, 200], rows=64, loud=9).case(
            "32 heads", within=laid_out_for_many
        ),
        Chosen(F16, 1, 16, 1, 64, 48, 192, 129, 80, rows=64, loud=9).case(
            "on demand", within=functools.partial(with_memory, FEW=smaller(132))
        ),
    ],
}

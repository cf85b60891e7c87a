"""Oracle: attention over the same rows in one buffer, bit for bit, and float64 numpy loops. Rows of
the pool that a sequence has not hold NaN."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.errors import ShapeError
from mlx_moeflux.kernels.attention.attention import sdpa_fused
from mlx_moeflux.kernels.attention.paged_attention import paged_sdpa, paged_sdpa_fused
from tests.kernels.attention.test_attention import BF16, F16, F32, Attended
from tests.kernels.harness import Case, error

PAGE = 16


class Paged:
    """A call of attention with a tail whose buffers lie in blocks of a pool, in random order."""

    def __init__(self, dtype, B, Hq, Hkv, capacity, D, Dv, length, *, start=None, gate=0, rows=32):
        self.attended = call = Attended(
            dtype, B, Hq, Hkv, 1, capacity, D, Dv, length, start=start, gate=gate, causal=False
        )
        call.with_tail(rows)
        q, *buffers = call.arrays
        options = dict(call.options)
        del options["mask"]
        options["length"] = mx.array([length], mx.int32)
        self.sdpa = call.arrays, call.options | {"length": options["length"]}
        rng, pages = np.random.default_rng(length), capacity // PAGE
        blocks = rng.permutation(B * pages) + 1
        table = blocks.reshape(B, pages).astype(np.int32)
        pools = []
        for buffer in buffers:
            whole = np.array(buffer.astype(F32))
            pool = np.full(((B * pages + 1) * PAGE, Hkv, whole.shape[3]), np.nan, np.float32)
            for b in range(B):
                first = 0 if start is None else start[b]
                for token in range(length - first):
                    row = table[b, token // PAGE] * PAGE + token % PAGE
                    pool[row] = whole[b, :, first + token]
            pools.append(mx.array(pool).astype(dtype))
        self.arrays = q, *pools
        self.options = options | {"table": mx.array(table), "page": PAGE}

    def case(self, name):
        run = lambda: [paged_sdpa_fused(*self.arrays, **self.options)]  # noqa: E731
        return Case(name, run, lambda: [self.attended.truth], lambda: self.attended.limit)


CALLS = {
    "padded left, parts": (BF16, 2, 4, 2, 128, 64, 32, 100, {"start": [37, 0]}),
    "parts": (F32, 1, 6, 2, 128, 48, 32, 65, {}),
    "one part, gated": (F16, 3, 6, 2, 64, 32, 64, 43, {"start": [0, 40, 5], "gate": 2}),
}


@pytest.mark.parametrize("name", CALLS)
def test_is_attention_over_one_buffer_to_the_bit(device, name):
    *sizes, options = CALLS[name]
    call = Paged(*sizes, **options)
    y = paged_sdpa_fused(*call.arrays, **call.options)
    assert error(y, call.attended.truth) <= call.attended.limit
    arrays, given = call.sdpa
    assert mx.array_equal(y, sdpa_fused(*arrays, **given)).item()


@pytest.mark.parametrize("name", CALLS)
def test_reference(name):
    *sizes, options = CALLS[name]
    call = Paged(*sizes, **options)
    q, *pools = (mx.where(mx.isnan(x), 0.0, x) for x in call.arrays)
    tail = tuple(mx.where(mx.isnan(x), 0.0, x) for x in call.options["tail"])
    y = paged_sdpa(q, *pools, **call.options | {"tail": tail})
    assert error(y, call.attended.truth) <= call.attended.limit + 1e-6


def test_what_does_not_fit_is_refused():
    *sizes, options = CALLS["parts"]
    call = Paged(*sizes, **options)
    q, k, v = call.arrays
    table = call.options["table"]
    for arrays, changed in (
        ((q, k, v), {"table": table.astype(mx.uint32)}),
        ((q, k, v[:-PAGE]), {}),
        ((q, k[:-1], v[:-1]), {}),
        ((mx.concatenate([q, q]), k, v), {}),
        ((q, k, v), {"table": table[:, :5]}),
    ):
        with pytest.raises(ShapeError):
            paged_sdpa_fused(*arrays, **call.options | changed)


CASES = {
    "attend_shared_parts": [Paged(*CALLS["parts"][:-1]).case("paged, 48/32, float32")],
    "attend_shared": [
        Paged(F16, 6, 96, 48, 64, 48, 32, 43, start=[0, 9, 0, 0, 1, 2]).case("paged"),
        Paged(F16, 6, 96, 48, 64, 48, 32, 43, start=[3, 9, 0, 0, 1, 2], gate=1).case("paged gate"),
    ],
}

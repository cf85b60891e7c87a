"""Oracle: numpy in float64; the naive error is stock MLX's. Rows of a tail are NaN elsewhere."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.errors import ShapeError
from mlx_moeflux.kernels.mla.latent_attention import latent_attention, latent_attention_fused
from tests.kernels.attention.test_attention import naive, truth
from tests.kernels.harness import Case, emulated, error

BF16, F16, F32 = mx.bfloat16, mx.float16, mx.float32


class Latents:
    """One random call of one query, the newest rows apart, and its truth. loud: times its scores,
    so that the largest rises from tile to tile."""

    def __init__(self, dtype, B, H, capacity, R, P, length, rows, start=None, mask=None, loud=1):
        mx.random.seed(capacity)
        draw = lambda *shape: mx.random.normal(shape).astype(dtype)  # noqa: E731
        q, q2 = loud * draw(B, H, 1, R), loud * draw(B, H, 1, P)
        k, k2 = draw(B, 1, capacity, R), draw(B, 1, capacity, P)
        both = mx.concatenate([q, q2], -1), mx.concatenate([k, k2], -1), k
        given = {"scale": (R + P) ** -0.5, "causal": False, "length": [length] * B}
        given["start"] = start or [0] * B
        self.wanted = truth(*both, **given)
        self.limit = 2 * error(naive(*both, **given), self.wanted)
        first = (length - 1) // rows * rows
        ends, buffers = [], []
        for x in (k, k2):
            whole = np.array(x.astype(F32))
            end = np.full((B, 1, rows, x.shape[3]), np.nan, np.float32)
            end[:, :, : length - first] = whole[:, :, first:length]
            whole[:, :, first:] = np.nan
            ends.append(mx.array(end).astype(dtype))
            buffers.append(mx.array(whole).astype(dtype))
        self.arrays = q, q2, *buffers
        self.options = {"scale": (R + P) ** -0.5, "mask": mask, "tail": tuple(ends)}
        self.options |= {"length": length, "start": None if start is None else mx.array(start)}

    def case(self, name):
        call = lambda: [latent_attention_fused(*self.arrays, **self.options)]  # noqa: E731
        return Case(name, call, lambda: [self.wanted], self.limit)


@pytest.mark.parametrize("start", [None, [0, 40]])
def test_a_tail_of_latents(device, start):
    call = Latents(BF16, 2, 6, 128, 64, 32, 75, 64, start)
    for length in (75, mx.array([75], dtype=mx.int32)):
        y = latent_attention_fused(*call.arrays, **call.options | {"length": length})
        assert error(y, call.wanted) <= call.limit
    for clean in (False, True):
        # The reference reads what nobody wrote, with weight 0: so never NaN there.
        zero = lambda x: mx.where(mx.isnan(x), 0.0, x).astype(BF16)  # noqa: E731
        arrays = map(zero, call.arrays)
        options = call.options | {"tail": tuple(map(zero, call.options["tail"]))}
        options["length"] = mx.array([75], dtype=mx.int32) if clean else 75
        assert error(latent_attention(*arrays, **options), call.wanted) <= call.limit


def test_tails_of_latents_that_cannot_be():
    call = Latents(F32, 1, 4, 128, 64, 32, 65, 64)
    keys, rotary = call.options["tail"]
    for tail in ((keys[:, :, :48], rotary[:, :, :48]), (keys, rotary[..., :16]), (keys, keys)):
        with pytest.raises(ShapeError, match="tail"), emulated():
            latent_attention_fused(*call.arrays, **call.options | {"tail": tail})


CASES = {
    "attend_shared": [
        Latents(F16, 264, 3, 64, 64, 16, 50, 32, mask="causal").case("one part, causal"),
    ],
    "attend_shared_parts": [
        Latents(BF16, 2, 6, 128, 64, 32, 75, 64, [0, 40]).case("padded left"),
        Latents(F32, 1, 4, 128, 64, 32, 65, 64, mask="causal").case("a tail of one row, causal"),
    ],
}

"""Oracle: norm and rotation in float64 numpy; angles are products of float32, as everywhere."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.errors import ShapeError
from mlx_moeflux.kernels.attention.norm_rope import norm_rope, norm_rope_fused, offsets
from tests.kernels.harness import DTYPES, Case, emulated, error, float64

EPS = 1e-6


def truth(x, weight, *, dims, base, offset, traditional, frequencies=None):
    x = float64(x)
    B, T, _, _ = x.shape
    if weight is not None:
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * float64(weight)
    if frequencies is None:
        frequencies = base ** (-2.0 * np.arange(dims // 2) / dims)
    place = np.broadcast_to(np.array(offset), (B,))[:, None] + np.arange(T)
    angle = (place[..., None].astype(np.float32) * np.array(frequencies, np.float32)).astype(float)
    cos, sin = np.cos(angle)[:, :, None], np.sin(angle)[:, :, None]
    first = np.arange(dims // 2) * (2 if traditional else 1)
    second = first + (1 if traditional else dims // 2)
    y = x.copy()
    y[..., first] = x[..., first] * cos - x[..., second] * sin
    y[..., second] = x[..., first] * sin + x[..., second] * cos
    return y.swapaxes(1, 2)


class Turned:
    """One random call: its arrays, truth, and twice the error of stock operations."""

    def __init__(
        self, dtype, B, T, Hq, Hkv, D, Dv, *,
        dims, offset, norms="qk", gate=False, traditional=False, frequencies=False, Hv=None,
        weights=None,
    ):  # fmt: skip
        mx.random.seed(B + 7 * T + D)
        draw = lambda *shape: mx.random.normal(shape).astype(dtype)  # noqa: E731
        q, k = draw(B, T, Hq, D * (2 if gate else 1)), draw(B, T, Hkv, D)
        self.arrays = q, k, draw(B, T, Hv or Hkv, Dv)
        q_weight, k_weight = (
            draw(D).astype(other) if name in norms else None
            for name, other in zip("qk", weights or (dtype, dtype), strict=True)
        )
        turn = {"dims": dims, "base": 1e4, "offset": offset, "traditional": traditional}
        if frequencies:
            turn["frequencies"] = mx.random.uniform(shape=(dims // 2,))
        self.options = turn | {"q_weight": q_weight, "k_weight": k_weight, "eps": EPS}
        self.truth = [truth(q[..., :D], q_weight, **turn), truth(k, k_weight, **turn)]
        with mx.stream(mx.cpu):
            stock = norm_rope(*self.arrays, **self.options)
            self.limit = 2 * max(map(error, stock[:2], self.truth))
        self.truth.append(float64(self.arrays[2].swapaxes(1, 2)))

    def case(self, name):
        call = lambda: list(norm_rope_fused(*self.arrays, **self.options))  # noqa: E731
        return Case(name, call, lambda: self.truth, self.limit)


EQUIVALENT = {
    "norm_rope.metal": {
        "norm_rope_row: off by one >= -> > (2)": "there is no rotation at "
        "column DIMS, and so no partner",
    }
}

BF16, F16, F32 = mx.bfloat16, mx.float16, mx.float32
CASES = {
    "norm_rope": [
        Turned(BF16, 2, 3, 6, 2, 256, 256, dims=64, offset=mx.array([1000, 7]), gate=True).case(
            "Qwen3.5's heads"
        ),
        Turned(F32, 1, 5, 3, 1, 128, 64, dims=128, offset=4096, norms="k").case("all of the head"),
        Turned(F16, 2, 2, 5, 3, 96, 32, dims=36, offset=4000, norms="q").case("96, pairs of 18"),
        Turned(BF16, 2, 2, 4, 3, 128, 256, dims=96, offset=mx.array([9, 2]), Hv=2,
               weights=(F32, F16)).case("weights of other types, other heads of v"),
        Turned(F32, 3, 2, 5, 1, 64, 64, dims=64, offset=mx.array([5, 0, 9]), norms="",
               traditional=True, frequencies=True).case("DeepSeek's rotary parts"),
        Turned(BF16, 1, 2, 3, 2, 128, 32, dims=36, offset=8, norms="q", gate=True,
               weights=(F32, F16)).case("one norm, beside a gate"),
        Turned(F16, 1, 2, 3, 2, 64, 96, dims=32, offset=8, weights=(BF16, F32)).case("types"),
        Turned(BF16, 1, 3, 2, 1, 192, 64, dims=20, offset=3, traditional=True).case("192, odd"),
    ],
}  # fmt: skip


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("traditional", [False, True])
def test_norm_rope(dtype, traditional):
    Turned(
        dtype, 2, 3, 4, 2, 128, 128, dims=64, offset=mx.array([3, 70]), traditional=traditional
    ).case("either pairing").check()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_reference(dtype):
    call = Turned(dtype, 2, 3, 4, 2, 64, 32, dims=32, offset=17, gate=True, frequencies=True)
    q, k, v = norm_rope(*call.arrays, **call.options)
    limit = 1e-5 if dtype == F32 else 4 * mx.finfo(dtype).eps * 8
    assert max(map(error, (q, k, v), call.truth)) <= limit


def test_layers_of_a_prompt_share_the_array_of_their_position():
    assert offsets(7, 2) is offsets(7, 2)
    for position, batch in ((7, 2), (0, 1), (7, 20)):
        array = offsets(position, batch)
        assert array.dtype == mx.int32
        assert array.size >= max(batch, 8)
        assert array.tolist() == [position] * array.size


def test_a_long_way_into_the_context_the_trigonometry_stays_precise():
    call = Turned(F32, 1, 2, 1, 1, 64, 64, dims=64, offset=262_000, norms="")
    with emulated():
        q, _, _ = norm_rope_fused(*call.arrays, **call.options)
    assert error(q, call.truth[0]) <= 1e-5


BAD = {
    "multiple of 32": {"D": 40},
    "multiple of 64": {"D": 96, "traditional": True},
    "dims is 33": {"dims": 33},
    "dims is 130": {"dims": 130},
    "2 offsets for 1": {"offset": mx.array([1, 2])},
    "neither once nor twice": {"width": 96},
    "expected": {"weight": mx.ones((32,))},
    "cast one": {"dtype": F16},
    "differ in sequences": {"tokens": 4},
    "not \\(16,\\)": {"frequencies": mx.ones((8,))},
}


@pytest.mark.parametrize("message", BAD)
def test_what_does_not_fit_is_refused(message):
    bad = BAD[message]
    D = bad.get("D", 64)
    q = mx.zeros((1, 3, 2, bad.get("width", D)))
    k = mx.zeros((1, bad.get("tokens", 3), 1, D), bad.get("dtype", F32))
    with emulated(), pytest.raises(ShapeError, match=message):
        norm_rope_fused(
            q, k, k, q_weight=bad.get("weight"), k_weight=None, eps=EPS,
            dims=bad.get("dims", 32), base=1e4, offset=bad.get("offset", 0),
            frequencies=bad.get("frequencies"), traditional=bad.get("traditional", False),
        )  # fmt: skip

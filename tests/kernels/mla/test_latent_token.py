"""Oracles: numpy in float64, as in test_latent_attention.py; rows of buffer and tail that do not
count are NaN."""

from __future__ import annotations

import contextlib
import functools
from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.kernels.attention.plan import MEMORY, MEMORY_ELSEWHERE, MEMORY_ON_DEMAND
from mlx_moeflux.kernels.mla import latent_attention, latent_token
from mlx_moeflux.kernels.mla.latent_attention import latent_attention_fused
from tests.kernels.harness import emulated, error, patched, require_gpu
from tests.kernels.mla.test_latent_attention import BF16, F16, F32, Latents

# dtype, B, H, capacity, R, P, length, rows of the tail, start
CALLS = [
    (BF16, 1, 16, 128, 64, 16, 75, 64),
    (F32, 2, 32, 192, 128, 32, 130, 64, [0, 40]),
    (F16, 2, 16, 128, 64, 32, 65, 32, [3, 50]),
    (BF16, 1, 32, 320, 128, 64, 320, 64),
    (F32, 1, 16, 64, 64, 48, 1, 16),
]
# With memory on demand: batches, tiles in the tail and before it, several tiles of a part.
FEW = [
    (BF16, 1, 16, 128, 64, 16, 75, 64),
    (F16, 2, 32, 320, 64, 16, 290, 64, [0, 200]),
    (BF16, 1, 16, 704, 128, 32, 643, 64),
]
# Heads that come by 32: batches, tiles in the tail and before it, parts that begin within one.
MANY = [
    (BF16, 1, 32, 320, 64, 16, 320, 64),
    (F16, 2, 64, 192, 64, 16, 130, 64, [0, 40]),
    (BF16, 2, 32, 128, 64, 16, 97, 32, [3, 96]),
]


@contextlib.contextmanager
def with_memory(**changed):
    """As on a GPU that gives memory on demand; changed: names of latent_token."""
    caches = latent_attention._plan, latent_token.launch_of
    plenty = {"metal": 1 << 20, "cuda": 1 << 20}
    with patched(latent_token, *caches, MEMORY_ON_DEMAND=plenty, **changed):
        yield


# As where there are many positions.
laid_out_for_many = functools.partial(with_memory, MANY_POSITIONS=1)


def smaller(groups):
    return replace(latent_token.FEW, BN=32, groups=groups)


@contextlib.contextmanager
def seen():
    """Template arguments of attend_latents, launch by launch."""
    launches, plan_of = [], latent_attention._plan

    def watched(*args):
        plan = plan_of(*args)
        launches.append(plan.options["template"])
        return plan

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(latent_attention, "_plan", watched)
        yield launches


@pytest.mark.parametrize("sizes", CALLS, ids=str)
def test_agrees_with_float64(device, sizes):
    call = Latents(*sizes)
    for length in (sizes[6], mx.array([sizes[6]], dtype=mx.int32)):
        y = latent_attention_fused(*call.arrays, **call.options | {"length": length})
        # Of one position the naive way has no error; tiles of float32 lose 2^-20 of a product.
        assert error(y, call.wanted) <= max(call.limit, 2**-20 * np.abs(call.wanted).max())


@pytest.mark.parametrize("sizes", FEW, ids=str)
def test_few_positions_agree_with_float64(device, sizes):
    """With tiles of half the positions, since the emulator has no more memory than Metal."""
    call = Latents(*sizes)
    groups = 4 if sizes == FEW[2] else 132  # parts of several tiles
    with with_memory(FEW=smaller(groups)), seen() as launches:
        y = latent_attention_fused(*call.arrays, **call.options)
    assert [(launch["W"], launch["MT"]) for launch in launches] == [(8, 1)]
    assert error(y, call.wanted) <= call.limit


@pytest.mark.parametrize("sizes", MANY, ids=str)
def test_many_positions_agree_with_float64(device, sizes):
    call = Latents(*sizes)
    with laid_out_for_many(), seen() as launches:
        y = latent_attention_fused(*call.arrays, **call.options)
    assert [launch["MT"] for launch in launches] == [2]
    assert error(y, call.wanted) <= call.limit


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("capacity", "length"),
    [(5120, 4033), (5120, 4700), (5120, 5120), (2304, 2049), (2304, 2304), (256, 1), (256, 200)],
)
def test_deepseeks_heads_on_a_gpu(capacity, length):
    """More memory than the emulator has."""
    require_gpu()
    call = Latents(BF16, 1, 128, capacity, 512, 64, length, 64)
    with seen() as launches:
        y = latent_attention_fused(*call.arrays, **call.options)
    (launch,) = launches
    if mx.cuda.is_available():
        needed = 160192 if capacity < 4096 else 94336
        enough = latent_token.memory_and_more("cuda")[1] >= needed
        assert launch["W"] == (8 if enough else 4)
    else:
        assert launch["W"] == 4
    assert error(y, call.wanted) <= call.limit


@pytest.mark.parametrize("buffers", [1, 2])
def test_with_less_memory(monkeypatch, buffers):
    sizes = CALLS[1]
    call = Latents(*sizes)
    dtype, B, H, capacity, R, P, _, rows, _ = sizes
    shape = (B, H, 1, R), (B, 1, capacity, R), P, rows, dtype
    limit = next(
        limit
        for limit in range(1024, 1 << 17, 1024)
        if (launch := latent_token.launch_of(limit, 0, *shape))
        and launch["template"]["BUFFERS"] == buffers
    )
    monkeypatch.setitem(MEMORY, "cuda", limit)
    monkeypatch.setitem(MEMORY_ON_DEMAND, "cuda", 0)
    with emulated(name="cuda"):
        y = latent_attention_fused(*call.arrays, **call.options)
    assert error(y, call.wanted) <= call.limit


def test_which_calls_it_takes():
    """DeepSeek-V3's on both GPUs; no others than of one token with a tail of whole tiles."""
    shape = {"q": (1, 128, 1, 512), "latents": (1, 1, 2304, 512), "rotary": 64, "tail": 64}
    for limit, buffers in ((MEMORY["cuda"], 2), (MEMORY_ELSEWHERE, 1)):
        launch = latent_token.launch_of(limit, 0, **shape, dtype=BF16)
        assert launch["template"]["BUFFERS"] == buffers
        assert launch["grid"] == (128 * 33, 1, 8)
    for changed in (
        {"q": (1, 128, 2, 512)},
        {"q": (1, 120, 1, 512)},
        {"q": (1, 128, 1, 496)},
        {"tail": 0},
        {"tail": 8},
        {"rotary": 0},
        {"rotary": 8},
        {"dtype": F32},
    ):
        options = shape | {"dtype": BF16} | changed
        assert latent_token.launch_of(MEMORY_ELSEWHERE, 0, **options) is None


def test_how_many_positions_are_laid_out():
    """DeepSeek-V3's on NVIDIA: 32 heads share what is read; where they cannot, 16."""
    shape = {"q": (1, 128, 1, 512), "latents": (1, 1, 4096, 512), "rotary": 64, "tail": 64}
    launch_of = functools.partial(latent_token.launch_of, MEMORY["cuda"])
    launch = launch_of(MEMORY_ON_DEMAND["cuda"], **shape, dtype=BF16)
    assert launch["grid"] == (256 * 33, 1, 4)
    assert launch["threadgroup"] == (256, 1, 1)
    assert latent_token.KERNEL.memory(launch["template"]) == 94336
    assert launch_of(94336, **shape, dtype=BF16) == launch
    for on_demand, changed in (
        (94335, {}),
        (1 << 20, {"latents": (1, 1, 4095, 512)}),
        (1 << 20, {"q": (1, 112, 1, 512)}),
        (1 << 20, {"q": (1, 128, 1, 480), "latents": (1, 1, 4096, 480)}),
        (1 << 20, {"tail": 16}),
    ):
        other = launch_of(on_demand, **shape | changed, dtype=BF16)
        assert other["template"]["MT"] == 1, changed


def test_few_positions_of_a_gpu_with_much_memory():
    """DeepSeek-V3's on a GPU with 227 KB for a threadgroup; with 99 as without any on demand."""
    shape = {"q": (1, 128, 1, 512), "latents": (1, 1, 2304, 512), "rotary": 64, "tail": 64}
    launch_of = functools.partial(latent_token.launch_of, MEMORY["cuda"], dtype=BF16)
    launch = launch_of(227 * 1024, **shape)
    assert (launch["grid"], launch["threadgroup"]) == ((256 * 16, 1, 8), (256, 1, 1))
    assert latent_token.KERNEL.memory(launch["template"]) == 160192
    assert launch_of(160192, **shape) == launch
    assert launch_of(160191, **shape) == launch_of(0, **shape)
    assert launch_of(227 * 1024, **shape | {"tail": 32}) == launch_of(0, **shape | {"tail": 32})


CASES = {
    "attend_latents": [
        Latents(F32, 2, 32, 192, 128, 32, 130, 64, [0, 40]).case("padded left"),
        Latents(F16, 2, 16, 128, 64, 48, 65, 32, [3, 50], loud=9).case("a tail of one row"),
        Latents(F32, 1, 16, 64, 256, 32, 49, 16, loud=9).case("one buffer"),
        Latents(F16, 1, 16, 128, 64, 32, 100, 64).case("a part begins in the tail"),
        replace(
            Latents(BF16, 2, 64, 192, 64, 16, 130, 64, [0, 40], loud=9).case("32 heads"),
            within=laid_out_for_many,
        ),
        replace(
            Latents(F16, 2, 32, 320, 64, 16, 290, 64, [0, 200], loud=9).case("on demand"),
            within=functools.partial(with_memory, FEW=smaller(132)),
        ),
    ],
}
EVEN = "both sides are multiples of the step"
MASKED = "rows that do not count have a score of -inf"
EQUIVALENT = {
    "attention_latent.metal": {
        "attend_latents: off by one < -> + 1 < (4)": EVEN,
        "attend_latents: off by one > -> >=": "of speed alone",
        "attend_latents: off by one <= -> <": "at < D says so",
        "attend_latents: off by one < -> <= (2)": MASKED,
        "attend_latents: off by one < -> <=": MASKED,
        "attend_latents: off by one < -> <= (3)": MASKED,
        "attend_latents: off by one < -> + 1 < (7)": "powers of two",
        "attend_latents: off by one < -> + 1 < (9)": "powers of two",
        "stage_latents: off by one < -> <=": EVEN,
        "stage_latents: off by one < -> + 1 <": EVEN,
        "stage_latents: off by one < -> + 1 < (3)": EVEN,
        "stage_latents: off by one < -> <= (4)": MASKED,
        "stage_chosen: off by one < -> + 1 < (3)": EVEN,
    }
}

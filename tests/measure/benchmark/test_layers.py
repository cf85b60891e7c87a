"""Oracle: mlx-lm's layers, and our own with something wrong put in."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.errors import ExactnessError
from mlx_moeflux.experts.streaming.store import StreamedStore
from mlx_moeflux.kernels.attention.attention import causal_sdpa
from mlx_moeflux.kernels.moe.add_shared import add_shared
from mlx_moeflux.loading import load_model
from mlx_moeflux.measure.benchmark import bench
from mlx_moeflux.measure.benchmark.bench import Options
from mlx_moeflux.measure.benchmark.exact import LIMITS, OurParts, TheirParts, compare_layers
from mlx_moeflux.measure.benchmark.sides import MlxLm

IDS = np.random.default_rng(0).integers(0, 1000, (2, 13)).astype(np.int32)
DTYPES = {"float32": mx.float32, "bfloat16": mx.bfloat16}


@pytest.fixture(
    scope="module", params=["float32", pytest.param("bfloat16", marks=pytest.mark.slow)]
)
def theirs(request, nothing_is_collected, checkpoint):
    side = MlxLm(checkpoint, prefill_step_size=None)
    side.model.set_dtype(DTYPES[request.param])
    yield request.param, TheirParts(side.model)
    side.close()


def compare(checkpoint, theirs, **load):
    dtype, parts = theirs
    with load_model(
        checkpoint, expert_memory="50%", dtype=DTYPES[dtype], check_values=False, **load
    ) as model:
        return compare_layers("this", OurParts(model), parts, IDS, decode=3, dtype=dtype)


def test_right_layers_agree(checkpoint, theirs):
    line = compare(checkpoint, theirs)
    assert line.startswith(f"exact: this, layer by layer in {theirs[0]}: layer ")
    assert line.endswith(f"tolerance {LIMITS[theirs[0]]:g}")


def weaker_experts(residual, experts, *shared, score):
    return add_shared(residual, experts * 0.7, *shared, score=score)


def no_past(q, k, v, *, length, **options):
    if q.shape[2] == 1 and isinstance(length, int):
        k, v, length = k[:, :, length - 1 : length], v[:, :, length - 1 : length], 1
    return causal_sdpa(q, k, v, length=length, **options)


def not_finite(residual, experts, *shared, score):
    return add_shared(residual, experts, *shared, score=score) / 0


def test_wrong_experts_are_found(checkpoint, theirs):
    with pytest.raises(ExactnessError, match=r"layer \d differs most.*no speed is printed"):
        compare(checkpoint, theirs, kernels={"add_shared": weaker_experts})


def test_wrong_decoding_is_found(checkpoint, theirs):
    with pytest.raises(ExactnessError, match=r"layer 3 differs most"):
        compare(checkpoint, theirs, kernels={"sdpa": no_past})


def test_nan_is_found(checkpoint, theirs):
    with pytest.raises(ExactnessError, match=r"layer \d differs most, by nan"):
        compare(checkpoint, theirs, kernels={"add_shared": not_finite})


@pytest.mark.slow
def test_the_benchmark_takes_it_in_16_bits(checkpoint, monkeypatch):
    small = {"contexts": (5,), "generation_tokens": 3, "trials": 1}
    options = Options(("25%",), compare="mlx-lm", load={"dtype": mx.bfloat16}, **small)
    report = bench.benchmark(checkpoint, options)
    assert "identical bits" in report.exact[0]
    assert "against mlx-lm, layer by layer in bfloat16" in report.exact[1]

    def factor(number):
        def changed(self, layer, x, ids, weights):
            return original(self, layer, x, ids, weights) * number

        return changed

    # Rounding differs: whole logits drift apart, layers do not.
    original = StreamedStore.experts
    monkeypatch.setattr(StreamedStore, "experts", factor(1.002))
    report = bench.benchmark(checkpoint, options)
    assert "experts read anew, layer by layer in bfloat16" in report.exact[0]
    monkeypatch.setattr(StreamedStore, "experts", factor(0.7))
    with pytest.raises(ExactnessError, match=r"streamed .* layer by layer in bfloat16: layer"):
        bench.benchmark(checkpoint, options)

"""Oracles: transformers' stored logits, and the references in float32 on the CPU.

Float32: within 1e-5 of the largest logit, with kernels and with references. Bfloat16: kernels are
at most twice as far from the truth as references.
"""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.convert import convert
from mlx_moeflux.errors import MemoryBudgetError
from mlx_moeflux.loading import load_model
from mlx_moeflux.synthesize import synthesize
from tests.kernels.harness import on_the_cpu, require_gpu
from tests.models.twins import CASES, GOLDEN, LIMIT, relative_error

pytestmark = pytest.mark.gpu

# Of the largest logit: some bits of bfloat16's eight, after a few layers.
ROUNDING = 0.05
# Twins whose widths can be quantised in any way, one of each family.
QUANTISED = ("text_top3", "qwen3_moe_top2", "qwen3_next_top3", "deepseek_v3_yarn40")
# Published widths with few experts: layers that hold each kind of layer once.
PUBLISHED = {"qwen3.5-35b-a3b": 4, "qwen3-30b-a3b": 1, "qwen3-next-80b-a3b": 4}


@pytest.fixture(autouse=True)
def _gpu():
    require_gpu()


@pytest.fixture(params=["auto", "reference"])
def kernels(request):
    return request.param


@pytest.fixture(params=["resident", "streamed"])
def memory(request):
    return request.param


def budget(memory: str, directory: Path) -> str | int:
    """All experts, or room for no more than one token's: what the error for a byte asks for."""
    if memory == "resident":
        return "100%"
    with pytest.raises(MemoryBudgetError) as refused:
        load_model(directory, expert_memory=1, dtype=mx.float32)
    return int(re.search(r"budget that works is (\d+) bytes", str(refused.value))[1])


def answers(directory: Path, tokens: mx.array, **options) -> list:
    """Logits ``[B, T, V]`` of the whole, of chunks, and of a prompt with tokens behind it."""
    T = tokens.shape[1]
    found = []
    with load_model(directory, **options) as model:
        for cuts in ([0, T], [0, 1, 2, 9, 16, T], [0, T - 5, *range(T - 4, T + 1)]):
            cache = model.make_cache()
            parts = [model(tokens[:, a:b], cache) for a, b in pairwise(cuts)]
            whole = mx.concatenate(parts, axis=1).astype(mx.float32)
            mx.eval(whole)
            found.append(whole)
    return found


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case, kernels, memory):
    golden = mx.load(str(GOLDEN / case / "golden.safetensors"))
    options = {"expert_memory": budget(memory, GOLDEN / case), "kernels": kernels}
    for logits in answers(GOLDEN / case, golden["tokens"], dtype=mx.float32, **options):
        assert relative_error(logits, golden["logits"]) <= LIMIT


@pytest.mark.parametrize("case", CASES)
def test_in_bfloat16_rounding_is_all_that_differs(case):
    """A choice of experts that hangs on rounding moves single positions: the median is compared."""
    golden = mx.load(str(GOLDEN / case / "golden.safetensors"))
    tokens, truth = golden["tokens"], np.array(golden["logits"])

    def off(kernels: str) -> list[float]:
        found = answers(GOLDEN / case, tokens, dtype=mx.bfloat16, kernels=kernels)
        assert all(np.isfinite(np.array(y)).all() for y in found)
        return [float(np.median(np.abs(np.array(y) - truth).max(axis=-1))) for y in found]

    naive, ours = off("reference"), off("auto")
    assert max(naive) <= ROUNDING * np.abs(truth).max()
    assert all(a <= 2 * b for a, b in zip(ours, naive, strict=True)), (ours, naive)


@pytest.mark.parametrize("experts", ["4 bits", "8 bits"])
@pytest.mark.parametrize("case", QUANTISED)
def test_quantised_twins(case, experts, kernels, memory, tmp_path):
    bits = int(experts[0])
    directory = convert(GOLDEN / case, tmp_path / "q", quantize=True, q_bits=bits, q_group_size=32)
    tokens = mx.load(str(GOLDEN / case / "golden.safetensors"))["tokens"]
    with on_the_cpu():
        expected = answers(directory, tokens, dtype=mx.float32, kernels="reference")
    options = {"expert_memory": budget(memory, directory), "kernels": kernels}
    ours = answers(directory, tokens, dtype=mx.float32, **options)
    for a, b in zip(ours, expected, strict=True):
        assert relative_error(a, b) <= LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("shape", sorted(PUBLISHED))
def test_published_widths(shape, kernels, memory, tmp_path):
    layers = PUBLISHED[shape]
    directory = synthesize(shape, tmp_path / "wide", layers=layers, experts=16)
    tokens = mx.array(np.random.default_rng(2).integers(0, 1000, (1, 24)))
    with on_the_cpu():
        expected = answers(directory, tokens, dtype=mx.float32, kernels="reference")
    options = {"expert_memory": "100%" if memory == "resident" else "60%", "kernels": kernels}
    for a, b in zip(answers(directory, tokens, dtype=mx.float32, **options), expected, strict=True):
        assert relative_error(a, b) <= LIMIT

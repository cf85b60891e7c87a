"""Oracles: transformers' stored logits, and the references in float32 on the CPU.

Float32: within 1e-5 of the largest logit, with kernels and with references. Bfloat16: kernels are
at most twice as far from the truth as references.
"""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.checkpoint.quantization import QuantSpec
from mlx_moeflux.conversion.convert import convert
from mlx_moeflux.conversion.synthesize import synthesize
from mlx_moeflux.errors import MemoryBudgetError
from mlx_moeflux.loading import load_model
from tests.kernels.harness import on_the_cpu, require_gpu
from tests.models.twins import CASES, GOLDEN, LIMIT, limit, relative_error

pytestmark = pytest.mark.gpu

# Of the largest logit: some bits of bfloat16's eight, after a few layers.
ROUNDING = 0.05
# Twins whose widths can be quantised in any way, one of each family.
QUANTISED = ("text_top3", "qwen3_moe_top2", "qwen3_next_top3", "deepseek_v3_yarn40")
# Bits of each projection of the experts, as mixed recipes choose them.
MIXED = {"gate_proj": 4, "up_proj": 3, "down_proj": 8}
# Published widths with few experts: layers that hold each kind of layer once. DeepSeek's and GLM's
# first three layers are dense.
PUBLISHED = {
    "qwen3.5-35b-a3b": 4,
    "qwen3-30b-a3b": 1,
    "qwen3-next-80b-a3b": 4,
    "deepseek-v3": 4,
    "glm-4.6": 4,
    "minimax-m2": 1,
    "gpt-oss-120b": 2,
}


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
    ways = [0, T], [0, 1, 2, 9, 16, T], [0, T - 5, *range(T - 4, T + 1)]
    with load_model(directory, **options) as model:
        return [logits(model, tokens, cuts) for cuts in ways]


def reference_logits(directory: Path, tokens: mx.array) -> mx.array:
    """Logits ``[B, T, V]`` of the whole, by the references in float32 on the CPU."""
    with on_the_cpu(), load_model(directory, dtype=mx.float32, kernels="reference") as model:
        return logits(model, tokens, [0, tokens.shape[1]])


def logits(model, tokens: mx.array, cuts: list[int]) -> mx.array:
    cache = model.make_cache()
    parts = [model(tokens[:, a:b], cache) for a, b in pairwise(cuts)]
    whole = mx.concatenate(parts, axis=1).astype(mx.float32)
    mx.eval(whole)
    return whole


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case, kernels, memory):
    golden = mx.load(str(GOLDEN / case / "golden.safetensors"))
    options = {"expert_memory": budget(memory, GOLDEN / case), "kernels": kernels}
    for ours in answers(GOLDEN / case, golden["tokens"], dtype=mx.float32, **options):
        assert relative_error(ours, golden["logits"]) <= limit(case)


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


def quantised(case: str, experts: str, out: Path) -> Path:
    """The twin's checkpoint with all weights at some bits, or each projection at its own."""

    def at(bits: int, layout: str) -> Path:
        options = {"quantize": True, "q_bits": bits, "q_group_size": 32, "layout": layout}
        return convert(GOLDEN / case, out / f"{bits}", **options)

    if experts != "mixed":
        return at(int(experts[0]), "packed")
    directories = {bits: at(bits, "safetensors") for bits in MIXED.values()}
    directory = directories[MIXED["gate_proj"]]
    weights = {bits: _tensors(path) for bits, path in directories.items()}
    config = json.loads((directory / "config.json").read_text())
    tensors = weights[MIXED["gate_proj"]]
    for projection, bits in MIXED.items():
        for name in [n for n in tensors if f"switch_mlp.{projection}." in n]:
            tensors[name] = weights[bits][name]
            for key in ("quantization", "quantization_config"):
                config[key][name.rpartition(".")[0]] = QuantSpec(bits, 32).to_config()
    for file in directory.glob("*.safetensors*"):
        file.unlink()
    mx.save_safetensors(str(directory / "model.safetensors"), tensors, {"format": "mlx"})
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def _tensors(directory: Path) -> dict[str, mx.array]:
    return {k: v for f in directory.glob("*.safetensors") for k, v in mx.load(str(f)).items()}


@pytest.mark.parametrize("experts", ["4 bits", "8 bits", "mixed"])
@pytest.mark.parametrize("case", QUANTISED)
def test_quantised_twins(case, experts, kernels, memory, tmp_path):
    directory = quantised(case, experts, tmp_path)
    tokens = mx.load(str(GOLDEN / case / "golden.safetensors"))["tokens"]
    expected = reference_logits(directory, tokens)
    options = {"expert_memory": budget(memory, directory), "kernels": kernels}
    for ours in answers(directory, tokens, dtype=mx.float32, **options):
        assert relative_error(ours, expected) <= LIMIT


@pytest.mark.slow
@pytest.mark.parametrize("shape", sorted(PUBLISHED))
def test_published_widths(shape, kernels, memory, tmp_path):
    layers = PUBLISHED[shape]
    directory = synthesize(shape, tmp_path / "wide", layers=layers, experts=16)
    tokens = mx.array(np.random.default_rng(2).integers(0, 1000, (1, 24)))
    expected = reference_logits(directory, tokens)
    options = {"expert_memory": budget(memory, directory), "kernels": kernels}
    for ours in answers(directory, tokens, dtype=mx.float32, **options):
        assert relative_error(ours, expected) <= LIMIT

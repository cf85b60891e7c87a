"""Oracle: the resident model. A streamed model has its bits, over prompts and decode steps, in a
pairwise cover of families, dtypes, forms of experts, numbers of sequences and budgets."""

from __future__ import annotations

import functools
import itertools
import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.checkpoint.quantization import QuantSpec
from mlx_moeflux.conversion.synthesize import synthesize
from mlx_moeflux.errors import MemoryBudgetError
from mlx_moeflux.loading import load_model
from mlx_moeflux.models.shapes import SHAPES
from tests.kernels.harness import require_gpu
from tests.models.twins import GOLDEN

# Family -> a shape of `synthesize`, and a twin whose experts are floats in rows of no multiple of
# 32, if there is one.
FAMILIES = {
    "qwen3.5": ("qwen3.5-tiny", "vision_top2"),
    "qwen3": ("qwen3-tiny", "qwen3_moe_window"),
    "qwen3-next": ("qwen3-next-tiny", "qwen3_next_yarn2"),
    "deepseek": ("deepseek-tiny", "deepseek_v3_groups"),
    "glm": ("glm-tiny", "glm4_moe_plain"),
    "glm-flash": ("glm-flash-tiny", "glm4_moe_lite_flash"),
    "kimi-k2.5": ("kimi-k2.5-tiny", "kimi_k25_wrapped"),
    "minimax": ("minimax-tiny", None),
    "gpt-oss": ("gpt-oss-tiny", None),
    "gemma": ("gemma-4-tiny", "gemma4_vision"),
    "laguna": ("laguna-tiny", None),
    "glm-5": ("glm-5-tiny", "glm_moe_dsa_shared"),
}
SCALES = {"4 bits, bf16": mx.bfloat16, "4 bits, f16": mx.float16, "4 bits, f32": mx.float32}
EXPERTS = ("floats", *SCALES, "mxfp4")
DTYPES = {"f32": mx.float32, "bf16": mx.bfloat16, "f16": mx.float16}
SEQUENCES, BUDGETS = (1, 2, 5), ("least", "50%", "99%")
# Tokens of the calls, by device: a prompt in two parts, and steps.
CALLS = {"gpu": (37, 90, 1, 1, 1, 1), "cpu": (9, 21, 1, 1, 1)}


class Combination(NamedTuple):
    """One row of the table."""

    family: str
    experts: str
    dtype: str
    sequences: int
    budget: str

    def __str__(self) -> str:
        return f"{self.family}, {self.experts}, {self.dtype}, B {self.sequences}, {self.budget}"


def pairwise_cover() -> Iterator[Combination]:
    """Every value of each column beside every value of each other one: a row for each family and
    form of experts, whose other columns are those that leave the fewest pairs open."""
    rest = list(itertools.product(DTYPES, SEQUENCES, BUDGETS))
    seen: set[tuple] = set()
    uses: dict[tuple, int] = dict.fromkeys(rest, 0)
    for place, (experts, family) in enumerate(itertools.product(EXPERTS, FAMILIES)):

        def pairs(values: tuple, before: tuple = (family, experts)) -> set[tuple]:
            return set(itertools.combinations(enumerate((*before, *values)), 2))

        turned = rest[place % len(rest) :] + rest[: place % len(rest)]
        best = max(turned, key=lambda values: (len(pairs(values) - seen), -uses[values]))
        seen |= pairs(best)
        uses[best] += 1
        yield Combination(family, experts, *best)


COMBINATIONS = list(pairwise_cover())
# Forms that kernels do not read: stock MLX computes them, row by row, which is marked on a GPU.
UNREAD = [
    Combination("qwen3", experts, *rest)
    for experts in ("3 bits", "6 bits", "mxfp8", "nvfp4")
    for rest in (("bf16", 1, "least"), ("bf16", 5, "50%"), ("f32", 2, "99%"))
]
# The CPU is slow in 16 bits. Of quantised experts each form beside a few families.
FEW = [
    row
    for row in COMBINATIONS
    if (row.experts == "floats" and FAMILIES[row.family][1])
    or (row.experts != "floats" and row.dtype == "f32" and row.sequences == 1)
    or (row.family in ("minimax", "gpt-oss", "laguna") and row.dtype == "f32")
]


def test_all_pairs_are_covered():
    columns = (FAMILIES, EXPERTS, DTYPES, SEQUENCES, BUDGETS)
    for (i, a), (j, b) in itertools.combinations(enumerate(columns), 2):
        found = {(row[i], row[j]) for row in COMBINATIONS}
        assert found == set(itertools.product(a, b))
    assert {row.experts for row in FEW} == set(EXPERTS)
    assert {row.family for row in FEW} == set(FAMILIES)


# ---- Checkpoints


@functools.cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="same-bits-")


@functools.cache
def checkpoint(family: str, experts: str) -> Path:
    """The directory of a family with experts in one form."""
    shape, twin = FAMILIES[family]
    # Beside the buffers of reads that a GPU needs, other twins have too few experts to stream.
    streams = mx.default_device() == mx.cpu or family in ("qwen3.5", "glm")
    if experts == "floats" and twin is not None and streams:
        return GOLDEN / twin
    out = Path(_folder().name) / f"{family} {experts}"
    hybrid = hasattr(SHAPES[shape], "full_attention_interval")
    synthesize(shape, out, layers=None if hybrid else 2, experts=16)
    with_experts(out, experts)
    return out


def with_experts(directory: Path, experts: str) -> None:
    """Store the experts of a synthesised checkpoint in one form, and the trunk as it is."""
    config = json.loads((directory / "config.json").read_text())
    known = config.get("quantization", {})
    for file in directory.glob("*.safetensors"):
        tensors = mx.load(str(file))
        names = [n for n in tensors if n.endswith(".scales") and is_routed(n)]
        for base in (name.removesuffix(".scales") for name in names):
            stored = {part: tensors.pop(f"{base}.{part}", None) for part in PARTS}
            spec, parts = in_form(stored, experts)
            tensors |= {f"{base}.{part}": array for part, array in parts.items()}
            known[base] = False if spec is None else spec.to_config()
        mx.eval(tensors)
        mx.save_safetensors(str(file), tensors, {"format": "mlx"})
    config["quantization"] = config["quantization_config"] = known
    (directory / "config.json").write_text(json.dumps(config))


PARTS = ("weight", "scales", "biases")


def is_routed(name: str) -> bool:
    return ".switch_mlp." in name or ".experts." in name


def in_form(
    stored: dict[str, mx.array | None], experts: str
) -> tuple[QuantSpec | None, dict[str, mx.array]]:
    """Quantised parts -> what `experts` names, with numbers that bfloat16 has not."""
    weight, scales, biases = stored.values()
    mode = "mxfp4" if biases is None else "affine"
    size = 32 if biases is None else 64
    dense = mx.dequantize(weight, scales, biases, group_size=size, bits=4, mode=mode)
    dense = dense.astype(mx.float32) * 1.0007
    if experts == "floats":
        return None, {"weight": dense.astype(mx.bfloat16)}
    affine = " bits" in experts
    spec = QuantSpec(int(experts[0]), 64) if affine else QuantSpec.of_mode(experts)
    weight, *scales = mx.quantize(dense, group_size=spec.group_size, bits=spec.bits, mode=spec.mode)
    if affine:
        scales = [array.astype(SCALES.get(experts, mx.bfloat16)) for array in scales]
    return spec, dict(zip(PARTS, (weight, *scales), strict=False))


# ---- Comparison


def budget_of(row: Combination, options: dict, expert_bytes: int) -> int:
    """The budget of a row, but at least what the error for a byte asks for."""
    with pytest.raises(MemoryBudgetError) as refused:
        load_model(checkpoint(row.family, row.experts), expert_memory=1, **options)
    found = re.search(r"budget that works is (\d+) bytes", str(refused.value))
    assert found, refused.value
    share = 0 if row.budget == "least" else int(row.budget.removesuffix("%"))
    return max(int(found[1]), expert_bytes * share // 100)


def answers(model, row: Combination) -> list[np.ndarray]:
    """The logits of all calls in float32, NaN being an error."""
    random, cache, found = np.random.default_rng(7), model.make_cache(), []
    for count in CALLS[mx.default_device().type.name]:
        ids = random.integers(0, model.config.vocab_size, (row.sequences, count))
        logits = np.array(model(mx.array(ids), cache).astype(mx.float32))
        assert np.isfinite(logits).all()
        found.append(logits)
    return found


def compare(row: Combination) -> None:
    """Compare a resident model with itself, and a streamed one with it."""
    directory = checkpoint(row.family, row.experts)
    options = {"dtype": DTYPES[row.dtype], "expert_threads": 1}
    with load_model(directory, expert_memory="100%", **options) as model:
        assert model.plan.resident
        budget = budget_of(row, options, model.plan.expert_bytes)
        expected = answers(model, row)
        assert same(answers(model, row), expected), f"{row}: a second run differs"
    with load_model(directory, expert_memory=budget, **options) as model:
        assert not model.plan.resident
        for run in range(2):
            given = answers(model, row)
            assert same(given, expected), f"{row}, run {run}: {difference(given, expected)}"
        assert model.store.stats().total.misses
        marks = model.store.stats().lossy
        assert bool(marks) == (row in UNREAD and mx.default_device() == mx.gpu), marks
        assert all("stock MLX promises no equal bits" in mark for mark in marks)


def same(a: list[np.ndarray], b: list[np.ndarray]) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def difference(a: list[np.ndarray], b: list[np.ndarray]) -> str:
    off = [float(np.abs(x - y).max() / np.abs(y).max()) for x, y in zip(a, b, strict=True)]
    return f"the calls differ by {off} of the largest logit"


@pytest.mark.parametrize("row", FEW, ids=str)
def test_streamed_is_resident(row):
    compare(row)


@pytest.mark.slow
@pytest.mark.parametrize("row", [r for r in COMBINATIONS + UNREAD if r not in FEW], ids=str)
def test_streamed_is_resident_in_the_whole_table(row):
    compare(row)


@pytest.mark.gpu
@pytest.mark.parametrize("row", COMBINATIONS + UNREAD, ids=str)
def test_streamed_is_resident_on_a_gpu(row):
    require_gpu()
    compare(row)

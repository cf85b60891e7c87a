"""Oracle: transformers' own classes; their stored logits of tiny random twins of every family."""

from __future__ import annotations

from itertools import pairwise

import mlx.core as mx
import pytest

from mlx_moeflux.loading import load_model
from tests.models.twins import CASES, GOLDEN, limit, relative_error, smallest_memory

# One of each family that streams with another mixer or router. They, and one of each other family,
# go token by token when resident, by default where a prompt begins and where it ends; the others go
# in parts.
STREAMED = ("deepseek_v3_groups", "glm4_moe_norms", "gpt_oss_sinks", "minimax_m2_norms")
STREAMED += ("gemma4_shared", "laguna_heads", "qwen3_moe_top2", "qwen3_next_top3")
STREAMED += ("qwen4_exp_rows", "text_top3")
STEPPED = (*STREAMED, "deepseek_v32_yarn40", "glm4_moe_lite_flash", "glm_moe_dsa_shared")
# Where T tokens are cut.
CUTS = {
    "token by token": lambda T: range(T + 1),
    "ends token by token": lambda T: [*range(8), *range(T - 7, T + 1)],
    "in parts": lambda T: [0, 1, 2, 9, 16, T],
}


def cut(case: str, memory: str, cuts: str, *, by_default: bool):
    marks = [] if by_default else [pytest.mark.slow]
    return pytest.param(case, memory, cuts, id=f"{case}-{memory}-{cuts}", marks=marks)


@pytest.mark.parametrize(
    ("case", "memory", "cuts"),
    [
        made
        for case in CASES
        for made in (
            cut(case, "resident", "ends token by token", by_default=case in STEPPED),
            cut(case, "resident", "in parts", by_default=case not in STEPPED),
            cut(case, "resident", "token by token", by_default=False),
            cut(case, "streamed", "in parts", by_default=case in STREAMED),
            cut(case, "streamed", "token by token", by_default=False),
        )
    ],
)
def test_logits_are_those_of_transformers(case, memory, cuts):
    golden = mx.load(str(GOLDEN / case / "golden.safetensors"))
    tokens, logits = golden["tokens"], golden["logits"]
    budget = "auto" if memory == "resident" else smallest_memory(GOLDEN / case)
    with load_model(GOLDEN / case, expert_memory=budget, dtype=mx.float32) as model:
        assert relative_error(model(tokens), logits) <= limit(case)
        cache = model.make_cache()
        parts = [model(tokens[:, a:b], cache) for a, b in pairwise(CUTS[cuts](tokens.shape[1]))]
        assert relative_error(mx.concatenate(parts, axis=1), logits) <= limit(case)
        last = model(tokens, last_only=True)
        assert relative_error(last, logits[:, -1:]) <= limit(case)


@pytest.mark.parametrize("case", CASES)
def test_left_padding_is_that_of_transformers(case):
    golden = mx.load(str(GOLDEN / case / "golden.safetensors"))
    with load_model(GOLDEN / case, dtype=mx.float32) as model:
        singles = [model.make_cache() for _ in golden["left_padding"].tolist()]
        merged = [type(row[0]).merge(list(row)) for row in zip(*singles, strict=True)]
        for entry in merged:
            entry.prepare(left_padding=golden["left_padding"].tolist())
        logits = model(golden["padded_tokens"], merged)
        for b, padding in enumerate(golden["left_padding"].tolist()):
            expected = golden["padded_logits"][b, padding:]
            assert relative_error(logits[b, padding:], expected) <= limit(case)


def by_dtype(case, usual, other):
    return (case, usual), pytest.param(case, other, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("case", "dtype"),
    [
        *by_dtype("text_top3", mx.float32, mx.bfloat16),
        *by_dtype("qwen3_moe_window", mx.bfloat16, mx.float32),
        *by_dtype("deepseek_v3_direct", mx.bfloat16, mx.float32),
        *by_dtype("qwen3_next_top3", mx.bfloat16, mx.float32),
    ],
)
def test_the_planned_state_is_what_the_cache_takes(case, dtype):
    """Of chunks that end before, at and behind the steps in which the buffers grow."""
    with load_model(GOLDEN / case, dtype=dtype) as model:
        cache, seen = model.make_cache(), 0
        for T in (1, 30, 224, 1, 1, 255, 1, 100):
            mx.eval(model(mx.zeros((1, T), mx.int32), cache, last_only=True))
            seen += T
            assert sum(entry.nbytes for entry in cache) == model.state_bytes(seen), seen


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[pytest.mark.slow] * (c != "qwen4_exp_rows")) for c in CASES]
)
@pytest.mark.parametrize("traced", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_each_sequence_has_its_offset(case, traced, monkeypatch):
    """Of one number in an axis of its own, MLX's GPU kernels read what lies behind it for all
    sequences but the first; its CPU broadcasts it."""
    rotate, right = mx.fast.rope, []

    def checked(x, *args, offset, **options):
        right.append(isinstance(offset, int) or offset.shape in ((), x.shape[:1]))
        return rotate(x, *args, offset=offset, **options)

    monkeypatch.setattr(mx.fast, "rope", checked)
    tokens = mx.random.randint(10, 60, (2, 17), key=mx.random.key(0))
    with load_model(GOLDEN / case, dtype=mx.float32, kernels="reference") as model:
        model.compile_steps, cache = traced, model.make_cache()
        for a, b in ((0, 15), (15, 16), (16, 17)):
            mx.eval(model(tokens[:, a:b], cache))
    assert right
    assert all(right)

"""Oracle: transformers' own classes; their stored logits of tiny random twins of every family."""

from __future__ import annotations

from itertools import pairwise

import mlx.core as mx
import pytest

from mlx_moeflux.loading import load_model
from tests.models.twins import CASES, GOLDEN, LIMIT, relative_error, smallest_memory


@pytest.mark.parametrize("memory", ["resident", "streamed"])
@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_transformers(case, memory):
    golden = mx.load(str(GOLDEN / case / "golden.safetensors"))
    tokens, logits = golden["tokens"], golden["logits"]
    budget = "auto" if memory == "resident" else smallest_memory(GOLDEN / case)
    with load_model(GOLDEN / case, expert_memory=budget, dtype=mx.float32) as model:
        assert relative_error(model(tokens), logits) <= LIMIT
        T = tokens.shape[1]
        # Token by token where every step may miss.
        for cuts in [[0, 1, 2, 9, 16, T]] if memory == "resident" else [list(range(T + 1))]:
            cache = model.make_cache()
            parts = [model(tokens[:, a:b], cache) for a, b in pairwise(cuts)]
            assert relative_error(mx.concatenate(parts, axis=1), logits) <= LIMIT
        last = model(tokens, last_only=True)
        assert relative_error(last, logits[:, -1:]) <= LIMIT


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
            assert relative_error(logits[b, padding:], expected) <= LIMIT


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize(
    "case", ["text_top3", "qwen3_moe_window", "deepseek_v3_direct", "qwen3_next_top3"]
)
def test_the_planned_state_is_what_the_cache_takes(case, dtype):
    """Of chunks that end before, at and behind the steps in which the buffers grow."""
    with load_model(GOLDEN / case, dtype=dtype) as model:
        cache, seen = model.make_cache(), 0
        for T in (1, 30, 224, 1, 1, 255, 1, 100):
            mx.eval(model(mx.zeros((1, T), mx.int32), cache, last_only=True))
            seen += T
            assert sum(entry.nbytes for entry in cache) == model.state_bytes(seen), seen

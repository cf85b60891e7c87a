"""Oracles: the head called by itself on all pairs, without a state from before; text, logprobs and
states without drafts."""

from __future__ import annotations

import mlx.core as mx
import pytest

from mlx_moeflux.generation import head_drafts
from mlx_moeflux.generation.batch import BatchGenerator
from mlx_moeflux.generation.drafting import MOST_DRAFTS
from mlx_moeflux.generation.drafts import begun, observes, proposed
from mlx_moeflux.generation.head_drafts import HeadDrafts
from mlx_moeflux.generation.loop import generate_step
from mlx_moeflux.loading import load_model
from tests.kernels.harness import require_gpu
from tests.models.heads import CASES, golden, head_file
from tests.models.twins import GOLDEN, LIMIT, relative_error, smallest_memory

QUICK = ("text_top3", "glm_moe_dsa_shared", "qwen4_exp_rows")
PROMPT = 9


def load(case, **options):
    options = {"drafts": "mtp", "mtp_path": head_file(case), "dtype": mx.float32} | options
    return load_model(GOLDEN / case, **options)


def text_and_states(model, case):
    """Ids of a text, and the hidden states of all its tokens [1, T, C]."""
    tokens, last = golden(case)["tokens"], len(model.layers) - 1
    with model.record([last], ["output"]) as kept:
        mx.eval(model(tokens))
    return tokens[0].tolist(), kept[last]["output"]


def expected(head, text, hidden, most, first=0):
    """Drafts after `text` from the pairs from position `first` on."""
    cache = head.make_cache()
    pairs = head.entering(hidden[:, first : len(text) - 1]), mx.array([text[first + 1 :]])
    read, drafts = head(pairs[0], pairs[1].astype(mx.uint32), cache)[:, -1:], []
    for _ in range(most):
        drafts.append(mx.argmax(head.logits(read), axis=-1).astype(mx.uint32))
        read = head(read, drafts[-1], cache)
    return [draft.item() for draft in drafts]


@pytest.mark.parametrize(
    ("case", "memory"),
    [
        *(pytest.param(case, "auto", marks=[pytest.mark.slow] * (case not in QUICK))
          for case in CASES),
        *(pytest.param(case, "least", marks=pytest.mark.slow) for case in CASES),
    ],
)  # fmt: skip
def test_drafts_depend_on_the_text_alone(case, memory):
    """Whatever was proposed before, and however the hidden states came."""
    budget = smallest_memory(GOLDEN / case) if memory == "least" else memory
    with load(case, expert_memory=budget) as model:
        head = model.prediction
        text, hidden = text_and_states(model, case)
        source = HeadDrafts(head)
        eager, late = (begun(source, text[:PROMPT]) for _ in range(2))
        assert observes(eager)
        position = 0
        for read in (PROMPT, 1, 1, 3, 1, 2):
            for drafts in (eager, late):
                drafts.observe(position, hidden[:, position : position + read])
            position += read
            known, most = text[: position + 1], 1 + position % MOST_DRAFTS
            ids = proposed(source, eager, known, most, model.config.vocab_size)
            assert ids == expected(head, known, hidden, most)
        assert proposed(source, late, known, 3, model.config.vocab_size) == expected(
            head, known, hidden, 3
        )


def test_before_the_prompt_is_read_and_for_none_nothing_is_proposed():
    with load("text_top3") as model:
        text, hidden = text_and_states(model, "text_top3")
        drafts = HeadDrafts(model.prediction).begin(text[:3])
        assert drafts.propose(text[:3], 3) == ()
        drafts.observe(0, hidden[:, :3])
        assert drafts.propose(text[:4], 0) == ()
        assert list(drafts.propose(text[:4], 1)) == expected(model.prediction, text[:4], hidden, 1)


@pytest.mark.parametrize("sizes", [(20,), (4, 16), (5, 5, 5, 5), (16, 4)])
def test_the_oldest_pairs_of_a_long_text_are_left_out(monkeypatch, sizes):
    most = 8
    monkeypatch.setattr(head_drafts, "MOST_PAIRS", most)
    with load("text_top3") as model:
        text, hidden = text_and_states(model, "text_top3")
        drafts = HeadDrafts(model.prediction).begin(text[:20])
        position = 0
        for size in sizes:
            drafts.observe(position, hidden[:, position : position + size])
            position += size
        kept = sum(part.shape[1] for _, part in drafts._observed)
        assert most <= kept < most + max(sizes)
        ids = drafts.propose(text[:21], 2)
        assert list(ids) == expected(model.prediction, text[:21], hidden, 2, first=20 - kept)


def generated(case, **options):
    """Ids and logprobs of a reply, the arrays of its state, and the number of drafts."""
    with load_model(GOLDEN / case, **options) as model:
        cache, prompt = model.make_cache(), golden(case)["tokens"][0]
        steps = list(generate_step(prompt, model, max_tokens=12, prompt_cache=cache))
        states = [array for entry in cache for array in entry.arrays if array is not None]
        return steps, states, model.store.stats().drafts.proposed


@pytest.mark.parametrize(
    ("case", "memory"),
    [
        *(pytest.param(case, "auto", marks=pytest.mark.slow)
          for case in CASES),
        *(pytest.param(case, "least", marks=[pytest.mark.slow] * (case != "text_top3"))
          for case in CASES),
    ],
)  # fmt: skip
def test_text_and_states_are_those_without_drafts(case, memory):
    compare_with_drafts(case, smallest_memory(GOLDEN / case) if memory == "least" else memory)


def test_a_sequence_alone_in_a_batch_has_them():
    """Whose head reads from the first step after the prompt on; another one joins and leaves."""
    case, found = "text_top3", []
    prompt = golden(case)["tokens"][0].tolist()
    for options in ({}, {"drafts": MOST_DRAFTS, "mtp_path": head_file(case)}):
        replies = {0: [], 1: []}
        with (
            load_model(GOLDEN / case, **options) as model,
            BatchGenerator(model, max_tokens=14) as generator,
        ):
            generator.insert([prompt])
            while steps := generator.next():
                for reply in steps:
                    replies[reply.uid].append(reply.token)
                if len(replies[0]) >= 4 and generator._uids == 1:
                    generator.insert([prompt[:7]], [3])
            assert (model.store.stats().drafts.proposed > 0) == bool(options)
        found.append(replies)
    assert found[0] == found[1]
    assert list(map(len, found[0].values())) == [14, 3]


@pytest.mark.parametrize("memory", ["auto", "least"])
@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=[pytest.mark.slow] * (c != "text_top3")) for c in CASES]
)
def test_traced_steps_give_the_hidden_states_too(case, memory):
    """A step of one token and three rows, from a trace and operation by operation."""
    budget, collected = smallest_memory(GOLDEN / case) if memory == "least" else memory, []
    tokens = golden(case)["tokens"]
    for traced in (False, True):
        with load_model(GOLDEN / case, expert_memory=budget, dtype=mx.float32) as model:
            model.compile_steps, cache = traced, model.make_cache()
            model(tokens[:, :9], cache)
            with model.collect_hidden() as found:
                mx.eval(model(tokens[:, 9:10], cache), model.read_rows(tokens[:, 10:13], cache))
            rows = mx.concatenate([h.reshape(1, -1, h.shape[-1]) for h in found], axis=1)
            collected.append(rows)
            assert bool(model.steps.whole.traces + model.steps.segments.traces) == traced
    assert collected[0].shape[1] == 4
    assert relative_error(collected[1], collected[0]) <= LIMIT


@pytest.mark.gpu
@pytest.mark.usefixtures("buffers_are_free")
@pytest.mark.parametrize("memory", ["auto", "least"])
@pytest.mark.parametrize("case", CASES)
def test_text_on_a_gpu_is_that_without_drafts(case, memory):
    require_gpu()
    compare_with_drafts(case, smallest_memory(GOLDEN / case) if memory == "least" else memory)


def compare_with_drafts(case, budget):
    """Of ids, logprobs and states, bit for bit, in the device's dtype."""
    steps, states, count = generated(
        case, drafts=MOST_DRAFTS, mtp_path=head_file(case), expert_memory=budget
    )
    expected, after, none = generated(case, expert_memory=budget)
    assert count > none == 0
    assert [token for token, _ in steps] == [token for token, _ in expected]
    for (_, one), (_, other) in zip(steps, expected, strict=True):
        assert mx.array_equal(one, other).item()
    for one, other in zip(states, after, strict=True):
        assert mx.array_equal(one, other).item()

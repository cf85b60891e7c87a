"""Oracle: the same generation without drafts. Tokens, logprobs and states have its bits, whatever a
source proposes, and so does what is left when a generation ends early."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import mlx.core as mx
import pytest

from mlx_moeflux import PromptCache, batch_generate, load, load_model, stream_generate
from mlx_moeflux.cache.state.spec import export
from mlx_moeflux.errors import InputError, UnsupportedError
from mlx_moeflux.generation import loop, runner
from mlx_moeflux.generation.batch import BatchGenerator
from mlx_moeflux.generation.drafting import MOST_DRAFTS, Drafting, make_drafting
from mlx_moeflux.generation.drafts import Lookup
from mlx_moeflux.generation.loop import generate_step
from mlx_moeflux.generation.sampling import make_logits_processors, make_sampler
from mlx_moeflux.loading import LoadOptions
from mlx_moeflux.loading import steps as loading_steps
from tests.devices import seen_as
from tests.models.twins import GOLDEN, smallest_memory
from tests.models_at_hand import TWIN, same_bits, tokens_of

# A delta net, a window of keys, latents; the others are slow.
FAMILIES = ("text_top3", "qwen3_moe_window", "deepseek_v3_groups")
SLOW = ("glm_moe_dsa_shared", "gemma4_shared", "qwen4_exp_rows", "gpt_oss_sinks", "laguna_heads")
SLOW += ("minimax_m2_norms", "glm4_moe_norms", "qwen3_next_top3", "kimi_k2_group1")
COUNT = 14
PROMPT = tokens_of(11)[0].tolist()


def families(*by_default: str):
    """All families, of which these are not slow."""
    marks = {True: [], False: [pytest.mark.slow]}
    return pytest.mark.parametrize(
        "family", [pytest.param(f, marks=marks[f in by_default]) for f in (*FAMILIES, *SLOW)]
    )


class Replay:
    """Proposes a known text, and another token in place of each that `wrong` names."""

    def __init__(self, text: Sequence[int], right: float = 1.0, *, vocabulary: int = 64):
        rng = random.Random(0)
        self._ids = [t if rng.random() < right else (t + 1) % vocabulary for t in text]
        self.calls: list[tuple[int, int]] = []

    def begin(self, prompt: Sequence[int]) -> Replay:
        return self

    def propose(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        self.calls.append((len(tokens), most))
        return self._ids[len(tokens) : len(tokens) + most]


class Noise(Replay):
    """Proposes any number of any tokens."""

    def __init__(self):
        self._rng = random.Random(1)

    def propose(self, tokens: Sequence[int], most: int) -> Sequence[int]:
        return [self._rng.randrange(64) for _ in range(self._rng.randint(0, most))]


class Observer(Replay):
    """Keeps the hidden states that it is given."""

    def __init__(self, text: Sequence[int]):
        super().__init__(text, 0.7)
        self.found: list[tuple[int, mx.array]] = []

    def observe(self, position: int, hidden: mx.array) -> None:
        self.found.append((position, hidden))


@functools.cache
def model_of(family: str, memory: str = ""):
    directory = GOLDEN / family
    memory = memory or smallest_memory(directory)
    return load_model(directory, expert_memory=memory, dtype=mx.float32)


@pytest.fixture(scope="module")
def pair(two_bundled_layers):
    model, tokenizer = load(two_bundled_layers, expert_memory="25%")
    with model:
        yield model, tokenizer


@pytest.fixture(params=["cuda", pytest.param("cpu", marks=pytest.mark.slow)])
def kind(request, monkeypatch):
    """Whether plain steps are scheduled ahead of the caller."""
    monkeypatch.setattr(loop, "device", seen_as(request.param))
    return request.param


def said(
    model, source: Any = None, *, count: int = COUNT, fixed: int | None = MOST_DRAFTS, **options
):
    """Return the tokens, their logprobs and the state after them, with the drafts of `source`."""
    model.drafting = None if source is None else Drafting(source, fixed=fixed)
    state = model.make_cache()
    try:
        steps = generate_step(
            mx.array(PROMPT), model, max_tokens=count, prompt_cache=state, **options
        )
        pairs = list(steps)
    finally:
        model.drafting = None
    return [token for token, _ in pairs], [logprobs for _, logprobs in pairs], export(state)


def same(found, expected) -> None:
    tokens, logprobs, state = found
    assert tokens == expected[0]
    assert len(logprobs) == len(expected[1])
    assert all(same_bits(a, b) for a, b in zip(logprobs, expected[1], strict=True))
    same_state(state, expected[2])


def same_state(state, expected) -> None:
    assert state.keys() == expected.keys()
    for name, array in expected.items():
        assert same_bits(state[name], array), name


@families(*FAMILIES)
@pytest.mark.parametrize("memory", ["", pytest.param("100%", marks=pytest.mark.slow)])
def test_drafts_do_not_change_a_bit(family, memory, kind):
    model = model_of(family, memory)
    expected = said(model)
    text = PROMPT + expected[0]
    vocabulary = model.config.vocab_size
    for right in (1.0, 0.6, 0.0):
        same(said(model, Replay(text, right, vocabulary=vocabulary)), expected)
    same(said(model, Noise()), expected)


@families("text_top3")
@pytest.mark.parametrize("memory", ["", pytest.param("100%", marks=pytest.mark.slow)])
def test_other_sources_and_numbers_of_drafts_change_no_bit_either(family, memory, kind):
    model = model_of(family, memory)
    expected = said(model)
    source = Replay(PROMPT + expected[0], 0.8, vocabulary=model.config.vocab_size)
    same(said(model, Lookup(), fixed=2), expected)
    same(said(model, source, fixed=None), expected)


def test_a_text_that_is_known_takes_a_step_for_four_tokens(kind):
    model = model_of("text_top3")
    expected = said(model)
    before, source = model.store.stats().snapshot(), Replay(PROMPT + expected[0])
    said(model, source)
    drafts = model.store.stats().since(before).drafts
    # Three steps of four tokens; the last two take a step each.
    assert (drafts.rounds, drafts.proposed, drafts.accepted) == (3, 9, 9)


def batched(
    model, source: Any = None, *, fixed: int | None = MOST_DRAFTS, prompts=(PROMPT,), **options
):
    """Return the replies of a batch to each prompt, and the number of its steps."""
    model.drafting = None if source is None else Drafting(source, fixed=fixed)
    found, steps = [[] for _ in prompts], 0
    try:
        with BatchGenerator(model, max_tokens=COUNT, **options) as generator:
            generator.insert(prompts)
            while replies := generator.next():
                steps += 1
                for r in replies:
                    found[r.uid].append((r.token, r.finish_reason, r.logprobs))
    finally:
        model.drafting = None
    return found, steps


def same_replies(found, expected) -> None:
    assert [r[:2] for r in found] == [r[:2] for r in expected]
    assert all(same_bits(a[2], b[2]) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("sampled", [False, True])
def test_a_sequence_that_is_alone_in_a_batch_has_drafts(sampled, kind, monkeypatch):
    monkeypatch.setattr(runner, "device", seen_as(kind))
    model = model_of("text_top3")

    def run(source=None, fixed=MOST_DRAFTS):
        options: dict[str, Any] = {}
        if sampled:
            processors = make_logits_processors(None, 1.3, 9)
            options = {"sampler": make_sampler(1.4, seed=2), "logits_processors": processors}
        (found,), steps = batched(model, source, fixed=fixed, **options)
        return found, steps

    expected, plain = run()
    text = PROMPT + [token for token, *_ in expected]
    assert plain == COUNT
    for source in (Replay(text), Observer(text), Noise()):
        found, steps = run(source)
        same_replies(found, expected)
        assert steps < plain or isinstance(source, Noise)
    assert run(Replay(text))[1] <= 6


def test_a_stop_id_among_accepted_drafts_ends_a_reply_of_a_batch():
    model = model_of("text_top3")
    (expected,), _ = batched(model)
    text = PROMPT + [token for token, *_ in expected]
    for stop in {token for token, *_ in expected[3:6]}:
        (plain,), _ = batched(model, stop_ids=[stop])
        (found,), _ = batched(model, Replay(text), stop_ids=[stop])
        same_replies(found, plain)
        assert plain[-1][1] == "stop"


@families(*FAMILIES)
def test_an_error_among_rows_of_a_batch_repeats_the_step(family, kind, monkeypatch):
    """Rows before the one that failed are read again: the caller has not had them."""
    monkeypatch.setattr(runner, "device", seen_as(kind))
    model, errors = model_of(family), [KeyboardInterrupt, ValueError]
    (expected,), _ = batched(model)
    text = PROMPT + [token for token, *_ in expected]
    failing = [False]

    def sampler(logprobs: mx.array) -> mx.array:
        if failing[0] and rows.pop():
            raise errors[0]
        return mx.argmax(logprobs, axis=-1)

    for last in range(MOST_DRAFTS + 1):  # the row whose draw fails
        model.drafting, found = Drafting(Replay(text), fixed=MOST_DRAFTS), []
        with BatchGenerator(model, max_tokens=COUNT, sampler=sampler) as generator:
            generator.insert([PROMPT])
            found += generator.next()
            rows, failing[0] = [True, *[False] * last], True
            errors.reverse()
            with pytest.raises(errors[0]):
                found += generator.next()
            failing[0] = False
            while replies := generator.next():
                found += replies
        model.drafting = None
        assert len(found) == COUNT
        same_replies([(r.token, r.finish_reason, r.logprobs) for r in found], expected)


def test_sequences_that_are_not_alone_have_no_drafts():
    model = model_of("text_top3")
    prompts = (PROMPT, tokens_of(5, seed=3)[0].tolist())
    expected, _ = batched(model, prompts=prompts)
    source = Noise()
    source.propose = None  # not called
    drafted, steps = batched(model, source, prompts=prompts)
    assert steps == COUNT
    for mine, theirs in zip(drafted, expected, strict=True):
        same_replies(mine, theirs)


def test_a_prompt_that_joins_between_drafts_changes_nothing():
    model = model_of("text_top3")
    other = tokens_of(5, seed=3)[0].tolist()

    def run(source):
        model.drafting = None if source is None else Drafting(source, fixed=3)
        found: dict[int, list[int]] = {0: [], 1: []}
        with BatchGenerator(model, max_tokens=COUNT) as generator:
            generator.insert([PROMPT])
            while replies := generator.next():
                for r in replies:
                    found[r.uid].append(r.token)
                if len(found[0]) >= 4 and generator._uids == 1:
                    generator.insert([other], [4])
        model.drafting = None
        return found

    expected = run(None)
    assert run(Replay(PROMPT + expected[0])) == expected


def test_text_behind_a_stop_text_is_no_part_of_a_reply_of_batch_generate(pair):
    model, tokenizer = pair
    prompt = "def main(argv):\n"
    options: dict[str, Any] = {"max_tokens": 24, "return_token_ids": True, "return_logprobs": True}
    whole = batch_generate(model, tokenizer, [prompt], **options)
    text, ids = whole.texts[0], tokenizer.encode(prompt) + whole.token_ids[0]
    stop = text[8:11]
    plain = batch_generate(model, tokenizer, [prompt], stop=stop, **options)
    model.drafting = Drafting(Replay(ids, vocabulary=4096), fixed=3)
    found = batch_generate(model, tokenizer, [prompt], stop=stop, **options)
    model.drafting = None
    assert (found.texts, found.token_ids) == (plain.texts, plain.token_ids)
    assert found.logprobs == plain.logprobs
    assert found.stats.experts.drafts.accepted > 0


def test_the_gate_learns_of_each_token_and_not_of_the_time_of_the_caller(kind):
    model, notes = model_of("text_top3"), []
    expected = said(model)
    now = [0.0]
    drafting = Drafting(Replay(PROMPT + expected[0], 0.7), clock=lambda: now[0])
    note = drafting.gate.note

    def noted(drafts: int, accepted: int, seconds: float) -> None:
        notes.append((drafts, accepted))
        note(drafts, accepted, seconds + 1 + 0.2 * drafts)

    drafting.gate.note = noted
    before = model.store.stats().snapshot()
    model.drafting = drafting
    tokens = []
    for token, _ in generate_step(mx.array(PROMPT), model, max_tokens=COUNT):
        tokens.append(token)
        now[0] += 100.0
    model.drafting = None
    assert tokens == expected[0]
    assert drafting.gate.seconds == pytest.approx(sum(1 + 0.2 * drafts for drafts, _ in notes))
    rounds = [(drafts, accepted) for drafts, accepted in notes if drafts]
    stats = model.store.stats().since(before).drafts
    assert (stats.rounds, stats.proposed) == (len(rounds), sum(drafts for drafts, _ in rounds))
    assert stats.accepted == sum(accepted for _, accepted in rounds) > 0
    # The time of a plain step is known with its token: that of the last one never.
    plain = COUNT - stats.rounds - stats.accepted
    assert plain - 2 <= len(notes) - len(rounds) <= plain


@pytest.mark.slow
@pytest.mark.parametrize("temp", [0.0, 1.3])
def test_a_hundred_random_prompts(temp):
    model = model_of("text_top3")
    for seed in range(100):
        prompt = mx.array(tokens_of(3 + seed % 29, seed=seed)[0])

        def run(source=None, prompt=prompt, seed=seed):
            model.drafting = None if source is None else Drafting(source, fixed=1 + seed % 3)
            sampler = make_sampler(temp, seed=seed)
            found = list(generate_step(prompt, model, max_tokens=20, sampler=sampler))
            model.drafting = None
            return found

        plain = run()
        text = [*prompt.tolist(), *(token for token, _ in plain)]
        for source in (Lookup(), Replay(text, 0.7), Noise()):
            drafted = run(source)
            assert [t for t, _ in drafted] == [t for t, _ in plain]
            assert all(same_bits(a, b) for (_, a), (_, b) in zip(drafted, plain, strict=True))


class Remembers:
    """Processor and sampler with a state of their own, which see each token once."""

    def __init__(self):
        self.seen: list[tuple[int, ...]] = []
        self.draws = 0

    def __call__(self, tokens: mx.array, logits: mx.array) -> mx.array:
        self.seen.append(tuple(tokens.tolist()))
        return mx.where(mx.arange(logits.shape[1]) == len(self.seen) % 5, -1e9, logits)

    def sampler(self, logprobs: mx.array) -> mx.array:
        self.draws += 1
        return mx.argsort(-logprobs, axis=-1)[:, self.draws % 3]


SAMPLING = {
    "of the thread": lambda: {"sampler": make_sampler(1.5)},
    "seeded, filtered": lambda: {"sampler": make_sampler(1.2, 0.95, top_k=30, seed=5)},
    "XTC": lambda: {"sampler": make_sampler(1.0, xtc_probability=0.7, xtc_threshold=0.05, seed=2)},
    "penalties": lambda: {
        "sampler": make_sampler(1.3, seed=4),
        "logits_processors": make_logits_processors({3: 2.0}, 1.2, 7, 0.3, 9, 0.2, 8),
    },
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] * (n == "XTC")) for n in SAMPLING]
)
def test_sampled_text_is_that_of_its_seed(name, kind):
    model = model_of("text_top3")

    def sampled(source=None):
        mx.random.seed(7)
        found = said(model, source, **SAMPLING[name]())
        return found, mx.random.uniform().item()

    expected, draw_after = sampled()
    assert len(set(expected[0])) > 4
    for right in (1.0, 0.6):
        found, after = sampled(Replay(PROMPT + expected[0], right))
        same(found, expected)
        # What is drawn next in this thread is the same too.
        assert after == draw_after


def test_objects_with_a_state_see_each_token_once(kind):
    model = model_of("text_top3")

    def remembered(source=None):
        mine = Remembers()
        options = {"logits_processors": [mine], "sampler": mine.sampler}
        return said(model, source, **options), mine

    expected, plain = remembered()
    found, drafted = remembered(Replay(PROMPT + expected[0], 0.7))
    same(found, expected)
    assert drafted.seen == plain.seen
    assert drafted.draws == plain.draws


# How a generation ends, and after how many tokens by default.
ENDS = {None: (2, 3, 5), KeyboardInterrupt: (2, 5), ZeroDivisionError: (3,)}


@pytest.mark.parametrize("sampler", ["seeded", pytest.param("greedy", marks=pytest.mark.slow)])
def test_a_generation_that_ends_early_leaves_what_it_yielded(sampler, kind):
    """At every token: closed by the caller, an error in the caller's sampler, Ctrl-C in it."""
    model = model_of("text_top3")
    options = {} if sampler == "greedy" else {"sampler": make_sampler(1.5, seed=3)}
    text = PROMPT + said(model, **options)[0]

    def cut(end: int, source=None, error: type[BaseException] | None = None):
        state, draws = model.make_cache(), 0
        draw = make_sampler() if sampler == "greedy" else make_sampler(1.5, seed=3)

        def failing(logprobs):
            nonlocal draws
            draws += 1
            if error is not None and draws == end + 2:
                raise error
            return draw(logprobs)

        model.drafting = None if source is None else Drafting(source, fixed=3)
        steps = generate_step(
            mx.array(PROMPT), model, max_tokens=COUNT, prompt_cache=state, sampler=failing
        )
        found = []
        with nullcontext() if error is None else pytest.raises(error):
            for token, _ in steps:
                found.append(token)
                if error is None and len(found) == end:
                    break
        steps.close()
        model.drafting = None
        return found, export(state), draws

    for error, places in ENDS.items():
        for end in places if sampler == "seeded" else (2, 3, 5):
            expected = cut(end, error=error)
            found = cut(end, Replay(text), error=error)
            assert found[0] == expected[0]
            assert found[2] == expected[2]
            same_state(found[1], expected[1])


def test_an_interrupt_while_rows_are_read_changes_nothing(monkeypatch):
    model = model_of("text_top3")
    expected = said(model)
    source, state = Replay(PROMPT + expected[0]), model.make_cache()

    def interrupted(*args):
        read(*args)
        raise KeyboardInterrupt

    read = model.read_rows
    model.drafting = Drafting(source, fixed=3)
    steps = generate_step(mx.array(PROMPT), model, max_tokens=COUNT, prompt_cache=state)
    found = [next(steps)[0] for _ in range(4)]
    monkeypatch.setattr(type(model), "read_rows", lambda self, *args: interrupted(*args))
    with pytest.raises(KeyboardInterrupt):
        next(steps)
    monkeypatch.undo()
    model.drafting = None
    plain = model.make_cache()
    model(mx.array([PROMPT]), plain)
    for token in found:
        model(mx.array([[token]]), plain)
    same_state(export(state), export(plain))


def test_a_prompt_cache_goes_on_after_a_reply_with_drafts():
    model = model_of("text_top3")

    def turns(source):
        model.drafting = source
        with PromptCache(replies=True) as cache:
            found = []
            for prompt in (PROMPT, None, PROMPT[:8]):
                ids = prompt or [*PROMPT, *found[0], 5, 6, 7]
                resumed = cache.resume(model, ids)
                steps = generate_step(mx.array(ids), model, max_tokens=9, resumed=resumed)
                found.append([token for token, _ in steps])
                assert resumed.position == (len(PROMPT) + 9 if prompt is None else 0)
        model.drafting = None
        return found

    expected = turns(None)
    assert turns(Drafting(Replay(PROMPT + expected[0]), fixed=3)) == expected
    assert turns(Drafting(Lookup(), fixed=3)) == expected


def by_stream(pair, source: Any, prompt: str, **options):
    model, tokenizer = pair
    model.drafting = None if source is None else Drafting(source, fixed=3)
    try:
        return list(stream_generate(model, tokenizer, prompt, 24, **options))
    finally:
        model.drafting = None


def test_streams_say_what_was_a_draft_and_count_it(pair):
    prompt = "x = 1\nx = 1\nx = 1\nx ="
    plain = by_stream(pair, None, prompt)
    ids = pair[1].encode(prompt) + [r.token for r in plain]
    drafted = by_stream(pair, Replay(ids, 0.8, vocabulary=4096), prompt)
    assert [(r.text, r.token, r.finish_reason) for r in drafted] == [
        (r.text, r.token, r.finish_reason) for r in plain
    ]
    assert not any(r.from_draft for r in plain)
    stats = drafted[-1].experts.drafts
    assert 0 < stats.accepted == sum(r.from_draft for r in drafted) < stats.proposed
    assert stats.proposed <= 3 * stats.rounds
    assert stats.rejected_reads > 0
    table = drafted[-1].experts.table()
    assert table.as_dict()["drafts"] == stats.as_dict()
    assert f"{stats.accepted} of {stats.proposed} accepted in {stats.rounds} steps" in table.line()
    assert "drafts" not in plain[-1].experts.as_dict()


def test_a_stop_word_in_the_middle_of_accepted_drafts_ends_the_reply(pair):
    prompt = "def main(argv):\n"
    text = "".join(r.text for r in by_stream(pair, None, prompt))
    ids = pair[1].encode(prompt + text)
    for stop in (text[5:7], text[11:14]):
        plain = by_stream(pair, None, prompt, stop=stop)
        drafted = by_stream(pair, Replay(ids, vocabulary=4096), prompt, stop=stop)
        assert [(r.text, r.finish_reason) for r in drafted] == [
            (r.text, r.finish_reason) for r in plain
        ]
        assert plain[-1].finish_reason == "stop"


def test_a_schema_holds_with_drafts(pair):
    constrain = pytest.importorskip("mlx_moeflux.server.constrain")
    model, tokenizer = pair
    prompt, schema = "config = ", {"type": "object", "properties": {"a": {"type": "integer"}}}
    grammars = constrain.Grammars(tokenizer, model.config.vocab_size)
    grammar, length = grammars.json_schema(schema), len(tokenizer.encode(prompt))

    def constrained(source):
        processors = [grammars.constraint(grammar, length)]
        return by_stream(pair, source, prompt, logits_processors=processors, temp=1.0, seed=3)

    plain = [r.token for r in constrained(None)]
    for right in (1.0, 0.5):
        source = Replay(tokenizer.encode(prompt) + plain, right, vocabulary=4096)
        assert [r.token for r in constrained(source)] == plain


def test_a_source_observes_the_hidden_state_of_each_token_that_stays(kind):
    model = model_of("text_top3")
    expected = said(model)
    source = Observer(PROMPT + expected[0])
    same(said(model, source), expected)
    ends = [position + hidden.shape[1] for position, hidden in source.found]
    assert [position for position, _ in source.found] == [0, *ends[:-1]]
    assert ends[-1] == len(PROMPT) + COUNT
    hidden = mx.concatenate([hidden for _, hidden in source.found], axis=1)
    logits = model.logits(hidden[:, len(PROMPT) - 1 : -1])[0]
    logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    error = mx.abs(logprobs - mx.stack(expected[1])).max().item()
    assert error <= 1e-5


def test_nothing_is_drafted_while_events_see_each_token(pair, tmp_path):
    source = Replay([])
    with pair[0].trace(tmp_path / "trace.npz"):
        by_stream(pair, source, "def f():\n")
    assert source.calls == []


def test_a_plain_step_is_not_held_up_by_a_source_without_proposals(monkeypatch):
    """Ahead of the caller, the source is asked before the newest token is known."""
    monkeypatch.setattr(loop, "device", seen_as("cuda"))
    model, source = model_of("text_top3"), Replay([])
    same(said(model, source), said(model))
    assert source.calls[0] == (len(PROMPT), MOST_DRAFTS + 1)
    assert [length for length, _ in source.calls] == list(
        range(len(PROMPT), len(PROMPT) + COUNT - 2)
    )


WRONG = {
    "proposed [0, 64]; expected at most": [0, 64],
    "proposed [-1]; expected at most": [-1],
    "proposed 'ab'; expected at most": "ab",
    "proposed None; expected at most": None,
    "proposed [1, 1, 1, 1]; expected at most 3 ids": [1, 1, 1, 1],
}


@pytest.mark.parametrize("message", WRONG)
def test_what_is_no_draft_is_one_line(message):
    class Wrong(Replay):
        def propose(self, tokens, most):
            return WRONG[message]

    model = model_of("text_top3")
    with pytest.raises(InputError, match="the drafts Wrong") as caught:
        said(model, Wrong([]))
    assert message in str(caught.value)


def test_a_source_has_to_begin_with_an_object_that_proposes():
    class Empty:
        def begin(self, prompt):
            return None

    with pytest.raises(InputError, match=r"begin\(\) of the drafts Empty returned None"):
        said(model_of("text_top3"), Empty())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("lokup", "drafts is 'lokup'; give off, auto, mtp, lookup, a number from 1 to 3"),
        (0, "drafts is 0; give off"),
        (4, "drafts is 4; give off"),
        (True, "drafts is True; give off"),
        (None, "drafts is None; give off"),
        (Lookup, "Lookup are a class; pass an instance"),
        ([], "the drafts list have no 'begin'"),
    ],
)
def test_a_wrong_option_is_one_line(given, message):
    with pytest.raises(InputError, match=message):
        load_model(TWIN, drafts=given)


def test_ranks_have_no_drafts():
    options = LoadOptions(distributed=object(), drafts="auto")
    with pytest.raises(InputError, match="drafts are for one process"):
        loading_steps._checked(options)


def test_options_choose_the_source_and_the_number():
    model = model_of("text_top3")
    assert make_drafting("off", model) is None
    for given, fixed in (("auto", None), ("lookup", None), (2, 2)):
        made = make_drafting(given, model)
        assert isinstance(made.source, Lookup)
        assert made.fixed == fixed
    mine = Noise()
    assert make_drafting(mine, model).source is mine
    with load_model(TWIN, drafts=mine) as loaded:
        assert loaded.drafting.source is mine
    with load_model(TWIN) as loaded:
        assert loaded.drafting is None


def test_a_state_that_cannot_forget_rows_has_no_drafts(monkeypatch):
    model = model_of("text_top3")
    monkeypatch.setattr(type(model.make_cache()[0]), "takes_rows", False)
    with pytest.warns(UserWarning, match="^drafts 'auto' drafts nothing: a layer's state"):
        assert make_drafting("auto", model) is None
    with pytest.raises(UnsupportedError, match="load with drafts off"):
        make_drafting("lookup", model)


def slow_lookup(tokens: list[int], most: int) -> list[int]:
    for size in (4, 3, 2):
        for start in range(len(tokens) - size - 1, -1, -1):
            if tokens[start : start + size] == tokens[-size:]:
                return tokens[start + size : start + size + most]
    return []


def test_lookup_continues_the_last_occurrence_of_the_longest_end():
    rng, answers = random.Random(0), 0
    for _ in range(30):
        tokens = [rng.randrange(4) for _ in range(rng.randrange(1, 6))]
        drafts = Lookup().begin(tokens)
        for _ in range(40):
            if rng.random() < 0.7:
                most = rng.randint(1, 3)
                expected = slow_lookup(tokens, most)
                assert list(drafts.propose(tokens, most)) == expected
                answers += bool(expected)
            tokens.append(rng.randrange(4))
    assert answers > 100


def test_lookup_reads_each_token_a_constant_number_of_times():
    class Counted(list):
        reads = 0

        def __getitem__(self, place):
            Counted.reads += 1
            return super().__getitem__(place)

    tokens, rng = Counted(), random.Random(0)
    drafts = Lookup().begin(tokens)
    for _ in range(500):
        tokens.append(rng.randrange(50))
        drafts.propose(tokens, 3)
    assert Counted.reads <= 8 * 500
    with pytest.raises(InputError, match="1 <= shortest <= longest"):
        Lookup(longest=1)

"""Oracle: every prompt alone. Other sequences, which join, leave or pad, change no token, and no
bit where prompts are read one at a time."""

from __future__ import annotations

import gc
import random

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.cache.prompt.cache import PromptCache
from mlx_moeflux.errors import CacheError, ExpertFileError, InputError, MemoryBudgetError
from mlx_moeflux.generation import scheduler
from mlx_moeflux.generation.batch import Batch, BatchGenerator
from mlx_moeflux.generation.loop import generate_step
from mlx_moeflux.generation.prefill import PaddedPrefill, Prefill, Request, make_prefill
from mlx_moeflux.generation.sampling import make_logits_processors
from tests.models_at_hand import KINDS, VOCABULARY, by_default, model_of, same_bits

CHUNK = 16


@pytest.fixture(scope="module", params=KINDS)
def model(request, tmp_path_factory):
    with model_of(request.param, tmp_path_factory.mktemp(request.param)) as model:
        yield model


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    with model_of("hybrid", tmp_path_factory.mktemp("hybrid")) as model:
        yield model


@pytest.fixture(scope="module")
def alone(model):
    """(prompt seed, length) -> what it continues with: tokens and logprobs of 12 steps."""
    known = {}

    def reply(seed, length):
        if (seed, length) not in known:
            prompt = prompt_of(seed, length)
            steps = generate_step(mx.array(prompt), model, max_tokens=12, prefill_step_size=CHUNK)
            known[seed, length] = [(token, np.array(logprobs)) for token, logprobs in steps]
        return known[seed, length]

    return reply


def prompt_of(seed, length):
    return np.random.default_rng([seed, length]).integers(0, VOCABULARY, length).tolist()


def pages(model):
    """True unless its states have what a pool does not hold."""
    return not any("index_keys" in spec.arrays for spec in model.state_spec().entries)


def run_schedule(model, alone, seed, *, prefill_batch_size, close=0.0):
    """Random prompts that join and leave at random steps, held against their lone replies: bit for
    bit unless `close` is given."""
    draw = random.Random(seed)
    pool = draw.choice([None, 200_000, 1_000_000])
    generator = BatchGenerator(
        model,
        completion_batch_size=draw.randint(max(1, prefill_batch_size), 6),
        prefill_batch_size=prefill_batch_size,
        prefill_step_size=CHUNK,
        keep_states=draw.random() < 0.3,
        kv_pool_bytes=pool if pages(model) else None,
        max_pause=draw.choice([None, 0.0]),
    )
    names, heard, removed = {}, {}, set()
    left = draw.randint(2, 7)
    while left or len(generator):
        while left and draw.random() < 0.4:
            name, limit = (draw.randint(0, 5), draw.choice([1, 2, 5, 15, 16, 17, 40])), 0
            limit = draw.randint(1, 12)
            (uid,) = generator.insert([prompt_of(*name)], [limit])
            names[uid], heard[uid] = (name, limit), []
            left -= 1
        if heard and draw.random() < 0.1:
            gone = draw.choice(list(heard))
            generator.remove([gone])
            removed.add(gone)
        for reply in generator.next():
            assert reply.uid not in removed
            heard[reply.uid].append((reply.token, reply.logprobs))
            ended = len(heard[reply.uid]) == names[reply.uid][1]
            assert (reply.finish_reason == "length") == ended
            if ended and generator.keep_states:
                (_, length), limit = names[reply.uid]
                assert reply.prompt_cache.position == length + limit
    assert generator.nbytes == 0
    generator.close()
    for uid, got in heard.items():
        name, limit = names[uid]
        expected = alone(*name)[:limit]
        assert uid in removed or len(got) == limit
        for (token, logprobs), (right, exact) in zip(got, expected, strict=False):
            assert token == right
            apart = np.abs(np.array(logprobs) - exact).max()
            assert apart <= close if close else same_bits(logprobs, exact)


@by_default("hybrid", "deepseek_v3_groups")
@pytest.mark.parametrize("prefill_batch_size", [pytest.param(1, marks=pytest.mark.slow), 3])
@pytest.mark.parametrize("seed", [0, *(pytest.param(i, marks=pytest.mark.slow) for i in (1, 2))])
def test_batch_is_single(model, alone, seed, prefill_batch_size):
    run_schedule(model, alone, seed, prefill_batch_size=prefill_batch_size)


@pytest.mark.slow
@pytest.mark.parametrize("prefill_batch_size", [1, 3])
def test_batch_is_single_on_many_schedules(model, alone, prefill_batch_size):
    for seed in range(100, 150):
        run_schedule(model, alone, seed, prefill_batch_size=prefill_batch_size)


@pytest.fixture
def padded(monkeypatch):
    """Prompts that are read together are padded, as on GPUs."""

    def make_prefill(model, sequences, cache):
        return (PaddedPrefill if len(sequences) > 1 else Prefill)(model, sequences, cache)

    monkeypatch.setattr(scheduler, "make_prefill", make_prefill)


@by_default("hybrid", "deepseek_v3_groups")
@pytest.mark.parametrize(
    "seed", [4, *(pytest.param(i, marks=pytest.mark.slow) for i in (0, 1, 2, 3))]
)
def test_prompts_that_are_padded_get_the_same_tokens(model, alone, seed, padded):
    """Attention and delta rule take other implementations then: rounding differs."""
    run_schedule(model, alone, seed, prefill_batch_size=3, close=1e-4)


def test_an_expert_is_read_once_a_step(hybrid):
    """Two equal sequences cost the reads of one."""
    reads = []
    for count in (1, 2):
        with BatchGenerator(hybrid, prefill_batch_size=2) as generator:
            generator.insert([prompt_of(1, 7)] * count, [6] * count)
            generator.next()
            before = hybrid.store.stats().total.lookups
            while generator.next():
                pass
            reads.append(hybrid.store.stats().total.lookups - before)
    assert reads[0] == reads[1] > 0


def test_prompts_read_together_share_a_sweep(hybrid):
    prompts = [prompt_of(seed, 30) for seed in range(4)]
    read = []
    for together in (1, 4):
        with BatchGenerator(
            hybrid, completion_batch_size=4, prefill_batch_size=together
        ) as generator:
            generator.insert(prompts, [1] * 4)
            before = hybrid.store.stats().total.bytes_read
            while generator.next():
                pass
            read.append(hybrid.store.stats().total.bytes_read - before)
    # A quarter of the sweeps.
    assert read[1] < 0.4 * read[0]


@by_default("hybrid", "4 bits", "deepseek_v3_groups")
@pytest.mark.parametrize("cut", [pytest.param(1, marks=pytest.mark.slow), 6, 1000])
def test_prompts_read_together_have_the_bits_of_each_alone(model, cut, monkeypatch):
    """Logits and states, through every kind of mixer; within a call mixers go on in chunks."""
    monkeypatch.setattr(model, "prefill_chunk", cut)
    prompts = [mx.array(prompt_of(seed, n)) for seed, n in ((1, 13), (2, 1), (3, 5), (4, 28))]
    states, others = ([model.make_cache() for _ in prompts] for _ in range(2))
    for i, state in enumerate(states + others):
        mx.eval(model(mx.array([prompt_of(i % 4, 1 + i % 4)]), state))
    logits = model.read_together(prompts, states)
    for i, prompt in enumerate(prompts):
        assert same_bits(logits[i], model(prompt[None], others[i], last_only=True)[0, -1])
        kept, right = (state.snapshot().entries for state in (states[i], others[i]))
        for one, other in zip(kept, right, strict=True):
            assert one.columns == other.columns
            for a, b in zip(one.arrays, other.arrays, strict=True):
                assert same_bits(a, b)


def test_prompts_that_fail_together_leave_all_their_states(hybrid, monkeypatch):
    states = [hybrid.make_cache() for _ in range(3)]
    for i, state in enumerate(states):
        mx.eval(hybrid(mx.array([prompt_of(i, 4 + i)]), state))
    original, calls = type(hybrid.store).experts, []

    def failing(self, *arguments, **options):
        calls.append(0)
        if len(calls) == 2:
            raise ExpertFileError("pulled out")
        return original(self, *arguments, **options)

    monkeypatch.setattr(type(hybrid.store), "experts", failing)
    with pytest.raises(ExpertFileError, match="pulled out"):
        hybrid.read_together([mx.array(prompt_of(i, 9)) for i in range(3)], states)
    assert [state.position for state in states] == [4, 5, 6]


def test_each_sequence_has_its_own_sampler_and_processors(hybrid):
    prompts = [prompt_of(seed, 9) for seed in range(3)]
    processors = [None, make_logits_processors(repetition_penalty=1.7), []]
    samplers = [None, lambda logprobs: mx.argmin(logprobs, axis=-1), None]
    for keep in (False, True):
        with BatchGenerator(hybrid, max_tokens=8, keep_states=keep) as generator:
            uids = generator.insert(prompts, samplers=samplers, logits_processors=processors)
            got = {uid: [] for uid in uids}
            while replies := generator.next():
                for reply in replies:
                    got[reply.uid].append(reply.token)
        for i, uid in enumerate(uids):
            steps = generate_step(
                mx.array(prompts[i]),
                hybrid,
                max_tokens=8,
                sampler=samplers[i],
                logits_processors=processors[i] or (),
            )
            assert got[uid] == [token for token, _ in steps]


@by_default("hybrid", "deepseek_v3_groups")
def test_the_bare_step_gives_each_sequence_its_logits(model):
    prompts = {name: prompt_of(i, 3 + 4 * i) for i, name in enumerate("abc")}
    batch, states = Batch(model), {}
    for name, prompt in prompts.items():
        state = model.make_cache()
        mx.eval(model(mx.array([prompt]), state))
        states[name] = state.snapshot()
        batch.join([name], state)
    assert batch.names == list("abc")
    with pytest.raises(InputError, match="in the batch already"):
        batch.join(["a"], model.make_cache())
    with pytest.raises(InputError, match=r"shape \[2\], expected \[3\]"):
        batch.step(mx.array([1, 2]))
    logits = batch.step(mx.array([5, 6, 7]))
    batch.evaluate(logits)
    batch.leave(["b"])
    again = batch.step(mx.array([8, 9]))
    batch.evaluate(again)
    for name, tokens, rows in (("a", [5, 8], [0, 0]), ("c", [7, 9], [2, 1])):
        state = model.make_cache()
        state.restore(states[name])
        for token, row, got in zip(tokens, rows, (logits, again), strict=True):
            assert same_bits(got[row], model(mx.array([[token]]), state)[0, -1])
        other = batch.state(name)
        assert other.position == state.position
        probe = mx.array([[3]])
        assert same_bits(model(probe, other), model(probe, state))
    with pytest.raises(InputError, match="b is not in the batch"):
        batch.state("b")
    batch.leave(["a", "c"])
    assert len(batch) == batch.nbytes == 0


def test_replies_go_on_from_states_that_stay_as_they_are(hybrid):
    prompts = [prompt_of(seed, 6 + seed) for seed in range(3)]
    first = run(hybrid, prompts, keep=True)
    more = [[1, 2, 3], [4], [5, 6]]
    kept = [state.snapshot() for _, state in first]
    for _ in range(2):
        second = run(hybrid, more, caches=[state for _, state in first], keep=False)
        for prompt, (ids, _), extra, (got, _) in zip(prompts, first, more, second, strict=True):
            steps = generate_step(mx.array(prompt + ids + extra), hybrid, max_tokens=4)
            assert got == [token for token, _ in steps]
    for (_, state), before in zip(first, kept, strict=True):
        assert state.position == before.position


def run(model, prompts, *, caches=None, keep):
    with BatchGenerator(model, max_tokens=4, keep_states=keep) as generator:
        uids = generator.insert(prompts, caches=caches)
        ids, states = {uid: [] for uid in uids}, {}
        while replies := generator.next():
            for reply in replies:
                ids[reply.uid].append(reply.token)
                states[reply.uid] = reply.prompt_cache
    return [(ids[uid], states[uid]) for uid in uids]


def test_prompts_with_states_to_store_are_not_padded(model, monkeypatch):
    """A padded prompt stores the state at its end alone: the next turn of a chat needs others."""

    def kind(*stops):
        sequences = [
            Request(i, [1, 2, 3], 1, model.make_cache(), None, [], 3, 1, stops=stops)
            for i in range(2)
        ]
        with monkeypatch.context() as patched:
            patched.setattr(mx, "default_device", lambda: mx.gpu)
            return type(make_prefill(model, sequences))

    assert (kind(), kind(2)) == (PaddedPrefill, Prefill)


@pytest.mark.parametrize("way", ["apart", "padded"])
def test_removed_wherever_they_are(hybrid, way, request):
    if way == "padded":
        request.getfixturevalue(way)
    prompts = [prompt_of(seed, 40) for seed in range(5)]
    with BatchGenerator(
        hybrid, max_tokens=9, completion_batch_size=2, prefill_step_size=CHUNK, prefill_batch_size=2
    ) as generator:
        uids = generator.insert(prompts)
        generator.remove(uids[4:])
        assert len(generator) == 4
        generator.next()
        states = generator.remove(uids[:1], return_prompt_caches=True)
        assert states[uids[0]].position == 40
        generator.insert([prompts[0]])
        generator.next()  # some are half read now
        generator.remove([uids[2]])
        heard = set()
        while replies := generator.next():
            heard |= {reply.uid for reply in replies}
    assert heard == {uids[1], uids[3], 5}


def test_prompts_wait_on_when_a_prompt_cache_fails(hybrid, monkeypatch):
    resume, broken = Request.resume, [True]

    def fails(request, model, cache):
        if request.uid == 1 and broken:
            raise CacheError("no." * broken.pop())
        resume(request, model, cache)

    monkeypatch.setattr(Request, "resume", fails)
    with BatchGenerator(hybrid, max_tokens=2, prefill_batch_size=3) as generator:
        uids = generator.insert([prompt_of(seed, 9) for seed in range(3)])
        with pytest.raises(CacheError):
            generator.next()
        assert len(generator) == 3
        heard = set()
        while replies := generator.next():
            heard |= {reply.uid for reply in replies}
    assert heard == set(uids)


def test_wrong_requests_are_refused_and_leave_the_rest_alone(hybrid):
    with BatchGenerator(hybrid) as generator:
        for arguments, match in (
            (([[]],), "prompt 0 is empty"),
            (([[101]],), "101"),
            (([[1]], [0]), "max_tokens"),
            (([[1]], [1, 2]), "max_tokens has 2 entries for 1 prompts"),
        ):
            with pytest.raises(InputError, match=match):
                generator.insert(*arguments)
        with pytest.raises(CacheError, match="prompt 1 has 513 tokens > 512 that the context"):
            generator.insert([[1], [1] * 513])
        assert len(generator) == 0
        (uid,) = generator.insert([[1] * 511], [9])
        count = 0
        while replies := generator.next():
            count += len(replies)
        assert (uid, count) == (0, 2)
    with pytest.raises(InputError, match="closed"):
        generator.next()
    with pytest.raises(InputError, match="completion_batch_size"):
        BatchGenerator(hybrid, completion_batch_size=0)


@pytest.mark.parametrize(
    ("prefill_batch_size", "way", "keep"),
    [
        (1, "apart", True),
        (3, "padded", True),
        pytest.param(3, "apart", False, marks=pytest.mark.slow),
        pytest.param(1, "apart", False, marks=pytest.mark.slow),
        pytest.param(3, "apart", True, marks=pytest.mark.slow),
        pytest.param(3, "padded", False, marks=pytest.mark.slow),
    ],
)
def test_after_errors_it_goes_on_as_if_they_had_not_been(
    hybrid, monkeypatch, prefill_batch_size, way, keep, request
):
    if way == "padded":
        request.getfixturevalue(way)
    prompts = [prompt_of(seed, 9 + 7 * seed) for seed in range(5)]
    expected = [
        [token for token, _ in generate_step(mx.array(p), hybrid, max_tokens=6)] for p in prompts
    ]
    draw, original = random.Random(4), type(hybrid.store).experts

    def failing(self, *arguments, **options):
        if draw.random() < 0.1:
            raise draw.choice([ExpertFileError("pulled out"), KeyboardInterrupt()])
        return original(self, *arguments, **options)

    monkeypatch.setattr(type(hybrid.store), "experts", failing)
    failures = 0
    with BatchGenerator(
        hybrid,
        max_tokens=6,
        completion_batch_size=3,
        prefill_batch_size=prefill_batch_size,
        prefill_step_size=CHUNK,
        keep_states=keep,
    ) as generator:
        uids = generator.insert(prompts)
        got = {uid: [] for uid in uids}
        while len(generator):
            try:
                for one in generator.next():
                    got[one.uid].append(one.token)
            except (ExpertFileError, KeyboardInterrupt):
                failures += 1
    assert failures > 3
    assert [got[uid] for uid in uids] == expected


def test_warm_up_leaves_nothing_behind(hybrid):
    with BatchGenerator(hybrid, completion_batch_size=4) as generator:
        generator.warm_up(5)
        assert len(generator) == generator.nbytes == 0
        (uid,) = generator.insert([prompt_of(1, 5)], [1])
        assert [reply.uid for reply in generator.next()] == [uid] == [0]


def test_warm_up_keeps_to_its_memory_and_its_sizes(hybrid, monkeypatch):
    batches, step = [], BatchGenerator.step

    def counted(self):
        found = step(self)
        batches.append((self._scheduler.completion_batch_size, self.nbytes))
        return found

    monkeypatch.setattr(BatchGenerator, "step", counted)

    def sizes(state_bytes=None, **options):
        batches.clear()
        with BatchGenerator(hybrid, completion_batch_size=16, state_bytes=state_bytes) as generator:
            generator.warm_up(5, **options)
        assert state_bytes is None or max((n for _, n in batches), default=0) <= state_bytes
        return sorted({size for size, _ in batches})

    one = hybrid.state_bytes(7)
    assert sizes() == [1, 2, 4, 8, 16]
    assert sizes(most=8) == [1, 2, 4, 8]
    assert sizes(3 * one) == [1, 2]
    assert sizes(one - 1) == []
    asked = iter([True, True, False])
    sizes(go_on=lambda: next(asked))
    assert len(batches) == 2


@pytest.mark.slow
def test_warm_up_holds_the_memory_of_its_states_and_frees_it(hybrid):
    def peak(count):
        gc.collect()
        mx.clear_cache()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        states = count * hybrid.state_bytes(42)
        with BatchGenerator(hybrid, completion_batch_size=16, state_bytes=states) as generator:
            generator.warm_up(40)
        gc.collect()
        assert mx.get_active_memory() <= before + one // 4
        return mx.get_peak_memory() - before

    one = hybrid.state_bytes(42)
    peak(1)
    few, many = peak(2), peak(8)
    # A copy while sequences join, and activations of a prompt.
    activations = hybrid.activation_bytes(8 * 40)
    assert few <= 3 * 2 * one + activations
    assert many <= 3 * 8 * one + activations


# The store remembers the last few outputs that read its bank. A state of one token has 278 kB.
SLACK = 8192


def joins_and_leaves(model, count):
    draw = random.Random(1)
    with BatchGenerator(model, completion_batch_size=4) as generator:
        for i in range(count):
            generator.insert([prompt_of(i % 7, 1 + i % 5)], [draw.randint(1, 3)])
            if i % 3 == 0:
                generator.next()
            if i % 10 == 0:
                generator.remove([draw.randrange(i + 1)])
        while generator.next():
            pass
        assert generator.nbytes == len(generator) == 0
    gc.collect()
    mx.clear_cache()
    return mx.get_active_memory()


@pytest.mark.slow
def test_nothing_is_left_after_joins_and_leaves(hybrid):
    before = joins_and_leaves(hybrid, 20)
    assert joins_and_leaves(hybrid, 100) <= before + SLACK


@pytest.mark.slow
def test_nothing_is_left_after_ten_thousand_joins_and_leaves(hybrid):
    before = joins_and_leaves(hybrid, 20)
    assert joins_and_leaves(hybrid, 10_000) <= before + SLACK


@by_default("hybrid", "attention", "deepseek_v3_groups")
@pytest.mark.parametrize(
    ("parts", "together"),
    [(1, 1), (3, 3), *(pytest.param(*n, marks=pytest.mark.slow) for n in ((1, 3), (3, 1)))],
)
def test_a_paused_prefill_has_the_bits_and_reads_of_an_unbroken_one(
    model, together, parts, monkeypatch
):
    """Prompts pause after every layer and part of a mixer, while another sequence takes a step
    after each pause."""
    monkeypatch.setattr(model, "prefill_chunk", 100 if parts == 1 else 16)
    prompts = [prompt_of(seed, 40 + seed) for seed in range(together)]
    heard, lookups = {}, {}
    for pause in (None, 0.0):
        with BatchGenerator(
            model, prefill_batch_size=3, prefill_step_size=None, max_pause=pause
        ) as generator:
            (running,) = generator.insert([prompt_of(9, 5)], [60])
            generator.next()
            uids = generator.insert(prompts, [3] * together)
            said, steps, begun = {uid: [] for uid in uids}, 0, False
            shares, layers = [0.0], [0]
            while len(generator) > 1:
                before = model.store.stats().total.lookups
                replies = generator.step()
                steps += not begun
                if (work := generator.workload()).reading:
                    assert work[:3] == (0, together, 1)
                    shares.append(work.share)
                    layers.append(work.layers)
                if not begun:
                    lookups[pause] = lookups.get(pause, 0) + (
                        model.store.stats().total.lookups - before
                    )
                for reply in replies:
                    if reply.uid != running:
                        begun = True
                        said[reply.uid].append((reply.token, np.array(reply.logprobs)))
            heard[pause] = said.values()
            # One step for the whole prompt, or one for each part of a layer and the head.
            pauses = len(model.layers) * (1 + together * (parts - 1))
            assert steps == (1 if pause is None else pauses + 1)
            if pause is not None:
                assert shares == pytest.approx([layer / len(model.layers) for layer in layers])
                assert sorted(layers) == layers
                assert [*dict.fromkeys(layers)] == [*range(len(model.layers) + 1)]
            assert generator.workload()[:2] == (0, 0)
    for one, other in zip(*heard.values(), strict=True):
        for (token, logprobs), (right, exact) in zip(one, other, strict=True):
            assert token == right
            assert same_bits(logprobs, exact)
    # A step of the running sequence looks up K experts a layer; the prompt does so once.
    step = model.router.num_experts_per_tok * sum(1 for _ in model.moe_blocks())
    assert lookups[0.0] - lookups[None] == step * pauses


@by_default("hybrid", "attention")
def test_the_share_of_padded_prompts_grows_by_layers(model, padded):
    with BatchGenerator(model, prefill_step_size=20, max_pause=0.0) as generator:
        generator.insert([prompt_of(seed, 30 + seed) for seed in range(2)], [2, 2])
        works = []
        while not generator.step():
            works.append(generator.workload())
    layers, columns = len(model.layers), 30  # of the longest prompt without its last token
    calls = [(0, 20), (20, 10)]
    steps = [(read, size, layer) for read, size in calls for layer in range(1, layers + 1)]
    expected = [(read + size * layer / layers) / columns for read, size, layer in steps]
    assert sorted({w.share for w in works}) == pytest.approx(sorted({*expected}))
    assert {w.layers for w in works} == {*range(layers + 1)}
    assert all(w[:3] == (0, 2, 0) for w in works)


def test_what_leaves_during_a_pause_frees_its_place(hybrid):
    prompts = [prompt_of(seed, 30) for seed in range(3)]
    with BatchGenerator(hybrid, prefill_step_size=None, max_pause=0.0) as generator:
        uids = generator.insert(prompts, [4] * 3)
        assert generator.step() == []
        generator.remove(uids[:1])
        assert len(generator) == 2
        said = {uid: [] for uid in uids}
        while replies := generator.next():
            for reply in replies:
                said[reply.uid].append(reply.token)
        assert said[uids[0]] == []
        for uid, prompt in list(zip(uids, prompts, strict=True))[1:]:
            steps = generate_step(mx.array(prompt), hybrid, max_tokens=4)
            assert said[uid] == [token for token, _ in steps]
        (uid,) = generator.insert(prompts[:1], [4])
        generator.step()
        generator.remove([uid])
        assert len(generator) == 0
        assert generator.step() == []


def test_a_paused_prompt_that_fails_begins_again(hybrid, monkeypatch):
    steps = generate_step(mx.array(prompt_of(1, 30)), hybrid, max_tokens=3)
    expected = [token for token, _ in steps]
    original, calls = type(hybrid.store).experts, []

    def failing(self, *arguments, **options):
        calls.append(0)
        if len(calls) == 2:
            raise ExpertFileError("pulled out")
        return original(self, *arguments, **options)

    monkeypatch.setattr(type(hybrid.store), "experts", failing)
    with BatchGenerator(hybrid, prefill_step_size=None, max_pause=0.0) as generator:
        generator.insert([prompt_of(1, 30)], [3])
        generator.step()
        with pytest.raises(ExpertFileError):
            generator.step()
        said = []
        while replies := generator.next():
            said += [reply.token for reply in replies]
    assert said == expected


def test_prompts_wait_until_their_states_fit(hybrid):
    each = hybrid.state_bytes(9 + 8)
    with BatchGenerator(hybrid, max_tokens=8, state_bytes=int(2.5 * each)) as generator:
        uids = generator.insert([prompt_of(seed, 9) for seed in range(5)])
        said, most = dict.fromkeys(uids, 0), 0
        while replies := generator.next():
            most = max(most, len(replies))
            for reply in replies:
                said[reply.uid] += 1
    assert most == 2
    assert set(said.values()) == {8}


def test_memory_shortens_a_reply(hybrid):
    """A limit beyond memory, or none, is what memory holds; it must hold a token of the reply."""
    with BatchGenerator(hybrid, state_bytes=hybrid.state_bytes(256)) as generator:
        fits = 256
        assert hybrid.state_bytes(fits) < hybrid.state_bytes(fits + 1)
        for limit in (-1, fits, 100_000):
            assert generator.fitting(9, limit) == fits - 9
        assert generator.fitting(9, 20) == 20
        assert generator.fitting(fits - 1, -1) == 1
        with pytest.raises(MemoryBudgetError, match=rf"prompt of {fits} tokens .* bytes, and"):
            generator.fitting(fits, 1)
        with pytest.raises(CacheError, match="prompt has 600 tokens > 512 that the context"):
            generator.fitting(600, 1)
        assert generator.prompt_room() == fits - 1
    with BatchGenerator(hybrid) as generator:
        assert generator.fitting(500, -1) == 13
        assert generator.prompt_room() == 512
    with BatchGenerator(hybrid, state_bytes=1) as generator:
        assert generator.prompt_room() == 0


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("stored", [False, True])
def test_a_next_turn_goes_on_behind_the_reply(hybrid, ahead, stored):
    """Where the cache stores replies; a state one step ahead has the reply's last token."""
    prompt, cache = prompt_of(21, 20), PromptCache(replies=stored)
    with BatchGenerator(hybrid, prompt_cache=cache, keep_states=ahead) as generator:
        generator.insert([prompt, prompt_of(22, 9)], [4, 6])
        said = {0: [], 1: []}
        while replies := generator.next():
            for reply in replies:
                said[reply.uid].append(reply.token)
        turn = [*prompt, *said[0], *prompt_of(23, 5)]
        (uid,) = generator.insert([turn], [3])
        heard = [reply for _ in range(3) for reply in generator.next()]
    known = len(prompt) + (len(said[0]) - (not ahead) if stored else 0)
    assert {(reply.uid, reply.cached_tokens) for reply in heard} == {(uid, known)}
    steps = generate_step(mx.array(turn), hybrid, max_tokens=3)
    assert [reply.token for reply in heard] == [token for token, _ in steps]


@pytest.mark.parametrize("ahead", [pytest.param(False, marks=pytest.mark.slow), True])
def test_open_replies_run_together_until_memory_ends(hybrid, ahead):
    """The longest of them ends when the next token would not fit; one with a limit is whole."""
    starts, limits = [236, 238, 240, 242], [-1, 16, 10**6, -1]
    room = 4 * hybrid.state_bytes(256)
    assert hybrid.state_bytes(256) < hybrid.state_bytes(257) <= room / 2
    options = {"state_bytes": room, "open_reply": 4, "keep_states": ahead}
    with BatchGenerator(hybrid, **options) as generator:
        uids = generator.insert([prompt_of(i, n) for i, n in enumerate(starts)], limits)
        said, ends, together = dict.fromkeys(uids, 0), {}, []
        for _ in range(40):
            replies = generator.next()
            together.append(len(replies))
            for reply in replies:
                said[reply.uid] += 1
                if reply.finish_reason:
                    ends[reply.uid] = (reply.finish_reason, said[reply.uid])
            # The states of all after their newest tokens, which a step ahead has in it.
            longest = max((starts[uid] + said[uid] for uid in said if uid not in ends), default=0)
            running = len(uids) - len(ends)
            assert running * hybrid.state_bytes(longest) <= room
    assert together[0] == 4
    # While three or four run, each may have 256 tokens; the last has room for more.
    assert ends == {uids[3]: ("length", 14), uids[1]: ("length", 16), uids[2]: ("length", 16)}
    assert said[uids[0]] == 40


def test_breakpoints_are_stored(hybrid):
    """The state of recurrent layers is there only where it was stored."""
    beginning = prompt_of(1, 20)
    with PromptCache() as cache, BatchGenerator(hybrid, prompt_cache=cache) as generator:
        cached = []
        for ending in ([1, 2, 3], [4, 5, 6]):
            generator.insert([beginning + ending], [1], breakpoints=[[20]])
            cached += [reply.cached_tokens for reply in generator.next()]
    assert cached == [0, 20]

"""Oracle: the prompt alone. A prompt whose client left goes on where it was, with the same bits,
and stands in nobody's way."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.cache.prompt.cache import PromptCache
from mlx_moeflux.generation import scheduler
from mlx_moeflux.generation.batch import BatchGenerator
from mlx_moeflux.generation.loop import generate_step
from mlx_moeflux.generation.prefill import PaddedPrefill, Prefill
from tests.models_at_hand import KINDS, VOCABULARY, by_default, model_of, same_bits

CHUNK = 16
LIMIT = 3


@pytest.fixture(scope="module", params=KINDS)
def model(request, tmp_path_factory):
    with model_of(request.param, tmp_path_factory.mktemp(request.param)) as model:
        yield model


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory):
    with model_of("hybrid", tmp_path_factory.mktemp("hybrid")) as model:
        yield model


def prompt_of(seed, length):
    return np.random.default_rng([seed, length]).integers(0, VOCABULARY, length).tolist()


def alone(model, prompt, step_size=None):
    steps = generate_step(
        mx.array(prompt), model, max_tokens=LIMIT, prefill_step_size=step_size or len(prompt)
    )
    return [(token, np.array(logprobs)) for token, logprobs in steps]


def open_generator(model, *, cache=True, **options):
    options = {"max_tokens": LIMIT, "prefill_step_size": None, "max_pause": 0.0, **options}
    cache = PromptCache() if cache else None
    return BatchGenerator(model, prompt_cache=cache, **options)


def answer(generator, prompt, **options):
    """(steps until the first token, tokens of the prompt from the cache, reply)"""
    (uid,) = generator.insert([prompt], **options)
    steps, heard, cached = 1, [], 0
    while not (replies := generator.step()):
        steps += 1
    while replies:
        for reply in replies:
            assert reply.uid == uid
            heard.append((reply.token, np.array(reply.logprobs)))
            cached = reply.cached_tokens
        replies = generator.next()
    return steps, cached, heard


def leave_after(generator, steps, *prompts, **options):
    uids = generator.insert(prompts, **options)
    for _ in range(steps):
        assert generator.step() == []
    generator.remove(uids)
    assert len(generator) == 0
    assert generator.step() == []


def check(found, expected):
    assert len(found) == len(expected)
    for (token, logprobs), (right, exact) in zip(found, expected, strict=True):
        assert token == right
        assert same_bits(logprobs, exact)


@by_default("hybrid", "deepseek_v3_groups")
@pytest.mark.parametrize("step_size", [None, CHUNK])
def test_a_prompt_that_comes_again_goes_on(model, step_size):
    prompt = prompt_of(1, 40)
    expected = alone(model, prompt, step_size)
    with open_generator(model, prefill_step_size=step_size) as generator:
        whole, cached, heard = answer(generator, prompt)
        assert cached == 0
        check(heard, expected)
    for steps in {1, whole // 2, whole - 1}:
        with open_generator(model, prefill_step_size=step_size) as generator:
            leave_after(generator, steps, prompt)
            rest, cached, heard = answer(generator, prompt)
            assert rest <= whole - steps + 1  # one more: the prompt cache answers
            assert cached == len(prompt)
            check(heard, expected)


def test_who_leaves_again_and_again_comes_to_the_end(hybrid):
    prompt = prompt_of(2, 40)
    with open_generator(hybrid) as generator:
        whole, *_ = answer(generator, prompt_of(3, 40))
        for _ in range(whole // 2 - 1):
            leave_after(generator, 2, prompt)
        steps, cached, heard = answer(generator, prompt)
        assert steps <= 4
        assert cached == len(prompt)
        check(heard, alone(hybrid, prompt))


def test_a_longer_prompt_continues_where_the_turn_ended(hybrid):
    turn, end = prompt_of(4, 30), [1, 2, 3]
    following = [*turn, *prompt_of(5, 12)]
    with open_generator(hybrid) as generator:
        leave_after(generator, 3, [*turn, *end], breakpoints=[[len(turn)]])
        _, cached, heard = answer(generator, following)
        assert cached == len(turn)
        assert [token for token, _ in heard] == [token for token, _ in alone(hybrid, following)]


def test_another_prompt_does_not_wait_for_one_that_nobody_wants(hybrid):
    left, other = prompt_of(6, 40), prompt_of(7, 40)
    with open_generator(hybrid) as generator:
        whole, *_ = answer(generator, prompt_of(8, 40))
        leave_after(generator, whole - 2, left)
        steps, cached, heard = answer(generator, other)
        assert (steps, cached) == (whole, 0)
        check(heard, alone(hybrid, other))
        steps, cached, heard = answer(generator, left)
        assert steps <= 3
        check(heard, alone(hybrid, left))


@pytest.mark.parametrize("reason", ["no cache", "memory", "forgotten", "nothing read"])
def test_nothing_is_kept(hybrid, reason):
    prompt = prompt_of(9, 40)
    memory = hybrid.state_bytes(60) if reason == "memory" else None
    with open_generator(hybrid, cache=reason != "no cache", state_bytes=memory) as generator:
        whole, *_ = answer(generator, prompt_of(10, 40))
        leave_after(generator, 0 if reason == "nothing read" else whole - 2, prompt)
        if reason == "memory":
            answer(generator, prompt_of(11, 40))
        if reason == "forgotten":
            generator.forget()
        steps, cached, heard = answer(generator, prompt)
        assert (steps, cached) == (whole, 0)
        check(heard, alone(hybrid, prompt))


@pytest.mark.parametrize("way", [pytest.param("apart", marks=pytest.mark.slow), "padded"])
@pytest.mark.parametrize("step_size", [pytest.param(None, marks=pytest.mark.slow), CHUNK])
def test_one_of_three_leaves(hybrid, way, step_size, monkeypatch):
    """The others are not read again, and the cache has what was read of the one."""

    def make_prefill(model, sequences, cache):
        wide = len(sequences) > 1 and way == "padded"
        return (PaddedPrefill if wide else Prefill)(model, sequences, cache)

    monkeypatch.setattr(scheduler, "make_prefill", make_prefill)
    prompts = [prompt_of(12, 30), prompt_of(13, 70), prompt_of(14, 20)]
    with open_generator(hybrid, prefill_step_size=step_size) as generator:
        generator.insert(prompts)
        steps = 1
        while not generator.step():
            steps += 1
    with open_generator(hybrid, prefill_step_size=step_size) as generator:
        uids = generator.insert(prompts)
        for _ in range(3):
            generator.step()
        generator.remove([uids[1]])
        assert len(generator) == 2
        assert generator.workload().prompts.keys() == {uids[0], uids[2]}
        heard, taken = {uid: [] for uid in uids}, 3
        while len(generator):
            taken += not any(heard.values())
            for reply in generator.step():
                heard[reply.uid].append((reply.token, np.array(reply.logprobs)))
        assert taken <= steps
        assert heard.pop(uids[1]) == []
        for uid, prompt in ((uids[0], prompts[0]), (uids[2], prompts[2])):
            expected = alone(hybrid, prompt, step_size)
            assert [token for token, _ in heard[uid]] == [token for token, _ in expected]
            if way == "apart":
                check(heard[uid], expected)
        _, cached, last = answer(generator, prompts[1])
        whole = way == "padded" or step_size is None
        assert cached == (len(prompts[1]) if whole else CHUNK)
        expected = alone(hybrid, prompts[1], step_size)
        assert [token for token, _ in last] == [token for token, _ in expected]


def test_all_of_several_leave_and_one_comes_again(hybrid):
    prompts = [prompt_of(15, 40), prompt_of(16, 25)]
    with open_generator(hybrid) as generator:
        generator.insert(prompts)
        whole = 1
        while not generator.step():
            whole += 1
    with open_generator(hybrid) as generator:
        leave_after(generator, whole - 2, *prompts)
        steps, cached, heard = answer(generator, prompts[1])
        assert steps <= 4
        assert cached == len(prompts[1])
        check(heard, alone(hybrid, prompts[1]))


def test_progress_is_told_by_prompt(hybrid):
    prompts = [prompt_of(17, 30), prompt_of(18, 30)]
    with open_generator(hybrid) as generator:
        answer(generator, prompts[0][:20])
        uids = generator.insert([prompts[0], prompts[1]])
        read = []
        while not generator.step():
            read.append(generator.workload().prompts)
    assert all(one.keys() == set(uids) for one in read)
    for uid, cached in zip(uids, (20, 0), strict=True):
        told = [one[uid] for one in read]
        assert {first for first, _ in told} == {cached}
        counts = [count for _, count in told]
        assert counts == sorted(counts)
        assert cached <= counts[0] < counts[-1] <= 30

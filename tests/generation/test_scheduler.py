"""Oracle: which prompts run, by hand. No model: a state takes a byte a token."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from mlx_moeflux.cache.prompt.cache import PromptCache
from mlx_moeflux.errors import CacheError, MemoryBudgetError
from mlx_moeflux.generation.prefill import Request
from mlx_moeflux.generation.sampling import greedy
from mlx_moeflux.generation.scheduler import Scheduler, Workload

MODEL = SimpleNamespace(
    state_bytes=lambda tokens: tokens, context_left=lambda: 100, layers=[None] * 4
)


def scheduler(**options: Any) -> Scheduler:
    sizes = {"completion_batch_size": 4, "prefill_batch_size": 2}
    others = {"pool": None, "state_bytes": None, "prompt_cache": None, "keep_states": False}
    return Scheduler(MODEL, **{**sizes, **others, **options})


def request(uid: int, prompt: int = 10, limit: int = 10, reserved: int | None = None) -> Request:
    """A prompt of the ids ``uid``, without a cache to begin from."""
    reserved = limit if reserved is None else reserved
    return Request(uid, [uid] * prompt, limit, [], greedy, [], prompt, reserved, fresh=True)


def uids(found: Any) -> list[int]:
    return [] if found is None else [sequence.uid for sequence in found.sequences]


def test_prompts_are_read_in_their_order_as_many_as_there_is_room_for():
    queue, running = scheduler(), []
    queue.add(request(uid) for uid in range(7))
    for expected in ([0, 1], [2, 3], []):
        prefill = queue.schedule(running)
        assert uids(prefill) == expected
        assert queue.schedule(running) is prefill  # until it is read
        running += [] if prefill is None else prefill.sequences
        queue.end_prefill()
    assert queue.workload(len(running)) == Workload(waiting=3, running=4)
    assert not queue.idle
    assert uids(queue.schedule(running[1:])) == [4]


def test_a_long_prompt_is_not_overtaken():
    """Three states of 20 tokens fit, and none of 50 beside one that runs."""
    queue = scheduler(state_bytes=60)
    queue.add([request(0), request(1, prompt=40), request(2)])
    prefill = queue.schedule([])
    assert uids(prefill) == [0]
    queue.end_prefill()
    assert queue.schedule(prefill.sequences) is None
    assert uids(queue.schedule([])) == [1]


def test_the_longest_reply_beyond_its_reserve_ends_first():
    queue = scheduler(state_bytes=2 * 17)
    short, long = request(0, limit=50, reserved=4), request(1, limit=50, reserved=4)
    short.reply, long.reply = [5] * 4, [5] * 6
    queue.shorten([short, long])
    assert (short.limit, long.limit) == (50, 7)
    queue = scheduler(state_bytes=2 * 18)
    long.limit = 50
    queue.shorten([short, long])
    assert (short.limit, long.limit) == (50, 50)


def test_a_reply_has_what_context_and_memory_hold():
    queue = scheduler(state_bytes=60)
    assert queue.prompt_room() == 59
    assert queue.fitting(10, -1, used=0, what="it") == 50
    assert queue.fitting(10, 7, used=0, what="it") == 7
    assert scheduler().fitting(10, -1, used=0, what="it") == 91
    assert scheduler(keep_states=True).fitting(10, -1, used=0, what="it") == 90
    with pytest.raises(CacheError, match="it has 101 tokens > 100 that the context has room for"):
        queue.fitting(101, 1, used=0, what="it")
    with pytest.raises(MemoryBudgetError, match="it of 60 tokens has a state of 61 bytes"):
        queue.fitting(60, 1, used=0, what="it")


@pytest.mark.parametrize("state_bytes", [60, 39])
def test_what_is_parked_leaves_when_its_memory_is_wanted(state_bytes):
    with PromptCache() as cache:
        queue = scheduler(state_bytes=state_bytes)
        first, other, again = request(0), request(1), request(0)
        queue.add([first])
        prefill = queue.schedule([])
        assert prefill is not None
        first.read = 5
        queue.prompt_cache = cache  # without one nothing is parked
        queue.remove({0})
        assert queue.idle
        queue.prompt_cache = None
        queue.add([other])
        assert uids(queue.schedule([])) == [1]
        queue.end_prefill()
        queue.add([again])
        assert (queue.schedule([]) is prefill) == (state_bytes == 60)

"""Oracle: the resident layer, whichever threads call the store, and what the bank says it holds."""

import os
import random
import sys
import threading
import time

import mlx.core as mx
import pytest

from mlx_moeflux.experts.io.readers import make_reader
from mlx_moeflux.experts.streaming import layer as layer_module
from mlx_moeflux.experts.streaming.layer import MAX_UNEVALUATED
from mlx_moeflux.experts.streaming.store import StreamedStore
from tests.experts.helpers import CALLS, K, all_is_well, bank_is_right, random_call, same_bits

PACKAGE = os.path.dirname(layer_module.__file__)


def test_threads_wait_for_each_other(experts, open_store):
    """Calls so long that their results are evaluated before another thread gets its turn."""
    store, resident = open_store(4), experts.resident()
    calls = [random_call(30 + n, seed=n) for n in range(5)]
    expected = [resident.experts(3, *call) for call in calls]
    mx.eval(expected)
    right = []

    def work(seed):
        order = list(range(len(calls))) * 3
        random.Random(seed).shuffle(order)
        right.extend(same_bits(store.experts(3, *calls[i]), expected[i]) for i in order)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [True] * 45
    all_is_well(store, experts)


def in_thread(work):
    """What `work` returns in a thread that has ended."""
    made = []
    thread = threading.Thread(target=lambda: made.append(work()))
    thread.start()
    thread.join()
    return made[0]


@pytest.mark.parametrize("count", [1, MAX_UNEVALUATED + 2])
def test_lazy_results_of_an_ended_thread_block_nobody(experts, open_store, count):
    store = open_store(4)
    made = in_thread(lambda: [store.experts(3, *CALLS[0]) for _ in range(count)])
    with pytest.raises(RuntimeError, match="in current thread"):
        mx.eval(made[-1] + 1)
    all_is_well(store, experts)
    arrays = store._layers[3].bank.arrays
    all_is_well(store, experts)
    assert store._layers[3].bank.arrays is arrays, "the bank was left twice for one result"


def test_a_lazy_result_of_a_live_thread_stays_right(experts, open_store):
    """Evaluated, as only its own thread can, after every slot was read into again."""
    store, made, go = open_store(K), [], threading.Event()

    def work():
        # The sum holds the graph without holding the result that the store gave.
        made.append(store.experts(3, *CALLS[0]) + 0.0)
        assert go.wait(60)
        mx.eval(made[0])

    thread = threading.Thread(target=work)
    thread.start()
    while not made:
        time.sleep(0.001)
    all_is_well(store, experts)
    with pytest.raises(RuntimeError, match="in current thread"):
        mx.eval(made[0])
    go.set()
    thread.join()
    assert same_bits(made[0], experts.resident().experts(3, *CALLS[0]))
    all_is_well(store, experts)


def test_threads_that_evaluate_at_the_same_time(experts, open_store):
    """Decode steps, evaluated outside the store while other threads read into its slots."""
    store, resident = open_store(K), experts.resident()
    calls = [random_call(1, seed=seed) for seed in range(12)]
    expected = [resident.experts(3, *call) for call in calls]
    mx.eval(expected)
    right = []

    def work(seed):
        order = random.Random(seed).choices(range(len(calls)), k=60)
        right.extend(same_bits(store.experts(3, *calls[i]), expected[i]) for i in order)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert right == [True] * 180
    all_is_well(store, experts)


def test_what_is_handed_over_costs_no_copy(experts, open_store):
    store, go, done = open_store(K), threading.Event(), threading.Event()

    def work():
        store.experts(3, *CALLS[0])
        store.start_eval()
        done.set()
        assert go.wait(60)

    thread = threading.Thread(target=work)
    thread.start()
    assert done.wait(60)
    arrays = store._layers[3].bank.arrays
    all_is_well(store, experts)
    assert store._layers[3].bank.arrays is arrays
    go.set()
    thread.join()


@pytest.mark.slow
def test_interrupted_while_the_bank_is_left(experts):
    """KeyboardInterrupt at every line of the fence and of a resize."""
    # Not the store itself: a tracer raises where an interrupt cannot, before a lock is released.
    files = tuple(os.path.join(PACKAGE, name) for name in ("bank.py", "layer.py", "slots.py"))
    countdown = 0

    def tracer(frame, event, argument):
        nonlocal countdown
        if frame.f_code.co_filename not in files:
            return None
        if event == "line":
            countdown -= 1
            if countdown == 0:
                raise KeyboardInterrupt
        return tracer

    calls = [random_call(1, seed=seed) for seed in range(4)]
    expected = [experts.resident().experts(3, *call) for call in calls]

    def change(store):
        in_thread(lambda: store.experts(3, *calls[0]))
        sys.settrace(tracer)
        try:
            store.experts(3, *calls[1])
            store.resize(3, 5)
            store.resize(3, K)
        finally:
            sys.settrace(None)

    lines, finished = 0, False
    with StreamedStore(make_reader("pread", experts.refs), K, threads=1) as store:
        while not finished:
            lines += 5
            countdown = lines
            held = store.experts(3, *calls[2])
            try:
                change(store)
                finished = True
            except KeyboardInterrupt:
                pass
            assert bank_is_right(store, experts)
            for call, y in zip(calls, expected, strict=True):
                if call[1].shape[1] <= store.slots[3]:
                    assert same_bits(store.experts(3, *call), y)
            assert same_bits(held, expected[2])
            store.resize(3, K)
    assert lines > 200

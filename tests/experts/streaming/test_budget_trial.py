"""Oracle: the resident store, bit for bit, and a clock that gives each budget its cost."""

from __future__ import annotations

import os
import sys
import threading

import mlx.core as mx
import pytest

from mlx_moeflux import experts as package
from mlx_moeflux.errors import ExpertFileError
from mlx_moeflux.experts.policies.chooser import Cost
from mlx_moeflux.experts.policies.prefetch import AutoLookAhead
from mlx_moeflux.experts.policies.timed_budget import Budget, TimedBudget
from mlx_moeflux.experts.policies.timed_switch import TimedSwitch
from mlx_moeflux.experts.streaming.bank import LayerBank
from mlx_moeflux.experts.streaming.budget_trial import BudgetTrial
from tests.experts.helpers import LAYERS, K, all_is_well, bank_is_right, random_call, same_bits

LARGER, SMALLER = {3: 6, 5: 5}, {3: 3, 5: 3}
# Of the trial, made short: steps to the first turn, and from one to the next.
FIRST, LATER = 5, 5


@pytest.fixture(autouse=True)
def short(monkeypatch):
    for name, steps in (("warm_up", 2), ("settle", 2), ("stretch", 3)):
        monkeypatch.setattr(TimedBudget, name, steps)


@pytest.fixture
def timed_store(wrapped, experts, monkeypatch):
    """A function that opens a store whose steps take 1 s with the larger budget and `smaller`
    seconds else."""

    def timed_store(smaller=0.5, before=lambda *_: None, **options):
        now = [0.0]

        def clock(trial):
            now[0] += 1.0 if store.slots == LARGER else smaller if store.slots == SMALLER else 9.0
            return Cost(now[0], now[0] / 2)

        monkeypatch.setattr(BudgetTrial, "_clock", clock)
        sizes = {layer: layout.nbytes for layer, layout in experts.layouts.items()}
        larger, less = (
            Budget(slots, sum(n * sizes[layer] for layer, n in slots.items()))
            for slots in (LARGER, SMALLER)
        )
        trial = TimedBudget(larger, less, pairs=K)
        store = wrapped(before, slots=LARGER, timed_budget=trial, **options)
        return store

    return timed_store


def steps(store, count, experts=None, *, tokens=1, seed=0):
    """Run calls of both layers; compare them with resident ones. Return the slots after each."""
    found, resident = [], None if experts is None else experts.resident()
    for i in range(count):
        for layer in LAYERS:
            call = random_call(tokens, seed=1000 * seed + 10 * i + layer)
            y = store.experts(layer, *call)
            if resident is not None:
                assert same_bits(y, resident.experts(layer, *call))
        found.append(store.slots)
    return found


@pytest.mark.parametrize(
    ("smaller", "turns"), [(0.5, 3), pytest.param(0.99, 2, marks=pytest.mark.slow), (3.0, 2)]
)
@pytest.mark.parametrize("eviction", ["lfu", pytest.param("lru", marks=pytest.mark.slow)])
def test_the_better_budget_is_kept_and_bits_stay(timed_store, experts, smaller, turns, eviction):
    store = timed_store(smaller, eviction=eviction)
    slots = steps(store, 40, experts)
    assert slots[FIRST - 1 : FIRST + LATER - 1] == [SMALLER] * LATER
    changes = [a != b for a, b in zip([LARGER, *slots], slots, strict=False)]
    assert sum(changes) == turns == store.timed_budget.turns == store.generation
    assert slots[-1] == (SMALLER if smaller == 0.5 else LARGER)
    assert store.timed_budget.over
    total = store.stats().total
    assert total.hits + total.misses == total.lookups == 40 * 2 * K
    assert total.reads > total.misses  # what a larger bank had before
    all_is_well(store, experts)


def test_memory_never_exceeds_the_larger_budget(timed_store, monkeypatch):
    store, allocate, found = timed_store(), LayerBank._allocate, []

    def watched(bank, slots):
        found.append(store.bank_bytes + slots * bank.layout.nbytes)
        return allocate(bank, slots)

    most = store.bank_bytes
    assert most == store.timed_budget.larger.nbytes
    monkeypatch.setattr(LayerBank, "_allocate", watched)
    steps(store, 40)
    assert len(found) == 3 * len(LAYERS)
    assert max(found) <= most
    assert store.bank_bytes == store.timed_budget.smaller.nbytes


def test_a_larger_bank_has_again_what_it_had(timed_store, experts):
    store = timed_store()
    store.preload()
    held = {layer: set(store.residents(layer)) for layer in LAYERS}
    (x, _, weights), ids = random_call(1), mx.array([list(range(K))], mx.uint32)
    for count, slots in ((FIRST - 1, LARGER), (LATER, SMALLER), (1, LARGER)):
        for _ in range(count):
            for layer in LAYERS:
                store.experts(layer, x, ids, weights)
        assert store.slots == slots
        if slots == SMALLER:
            assert all(set(store.residents(layer)) == set(range(K)) for layer in LAYERS)
    assert {layer: set(store.residents(layer)) for layer in LAYERS} == held
    assert store.stats().total.misses == 0
    assert bank_is_right(store, experts)


@pytest.mark.parametrize("tokens", [2, pytest.param(12, marks=pytest.mark.slow), 40])
def test_other_calls_get_the_larger_budget_back(timed_store, experts, tokens):
    store = timed_store()
    steps(store, FIRST, experts)
    assert store.slots == SMALLER
    assert steps(store, 1, experts, tokens=tokens, seed=1) == [LARGER]
    assert steps(store, 3 * LATER, experts, tokens=tokens) == [LARGER] * 3 * LATER
    assert store.timed_budget.turns == 2


def test_a_listener_stops_the_trial(timed_store, experts):
    store, events = timed_store(), []
    store.events = events.append
    assert steps(store, 3 * FIRST, experts) == [LARGER] * 3 * FIRST
    assert store.timed_budget.steps == 0
    store.events = None
    assert steps(store, FIRST + 1, experts)[-1] == SMALLER
    store.events = events.append
    assert steps(store, 3, experts) == [SMALLER] * 3
    store.events = None
    assert steps(store, 1, experts) == [LARGER]
    assert steps(store, 4 * LATER, experts)[LATER - 1] == SMALLER


@pytest.mark.parametrize("resize", ["one", "all", "same"])
def test_slots_that_somebody_gives_stay(timed_store, experts, resize):
    store = timed_store()
    steps(store, FIRST)
    given = {"one": {3: 4, 5: 3}, "all": {3: 4, 5: 4}, "same": SMALLER}[resize]
    if resize == "one":
        store.resize(3, 4)
    else:
        store.resize_all(given)
    assert store.timed_budget is None
    assert steps(store, 6 * LATER, experts) == [given] * 6 * LATER


def test_a_prefetcher_is_timed_after_the_budget(timed_store, experts):
    class Noted(TimedSwitch):
        told, resets = (), 0

        def reset(self):
            super().reset()
            self.resets += 1

        def step(self, pairs, cost):
            self.told = (*self.told, cost.seconds)

    prefetch = AutoLookAhead()
    prefetch.switch = Noted()
    store = timed_store(prefetch=prefetch)
    steps(store, FIRST + 3 * LATER, experts)
    assert store.timed_budget.over
    assert not prefetch.switch.told
    assert prefetch.switch.resets == 1 + 3
    steps(store, 4, experts)
    assert prefetch.switch.told == (0.5,) * 4
    store.timed_budget.over = False
    store.events = print
    store.events = None
    steps(store, 1)
    assert len(prefetch.switch.told) == 4


def test_an_output_of_another_thread_puts_a_turn_off(timed_store, experts):
    store, call, kept = timed_store(), random_call(1, seed=77), []
    done, go = threading.Event(), threading.Event()

    def other():
        kept.append(store.experts(5, *call))
        done.set()
        go.wait()
        mx.eval(kept)

    steps(store, FIRST - 1)
    thread = threading.Thread(target=other)
    thread.start()
    try:
        done.wait()
        store.experts(3, *call)
        store.experts(5, *call)  # a hit: nothing is written that the other thread reads
        assert store.timed_budget.trying
        assert store.slots == LARGER
    finally:
        go.set()
        thread.join()
    assert steps(store, LATER, experts)[1] == SMALLER
    assert same_bits(kept[0], experts.resident().experts(5, *call))


@pytest.mark.parametrize("turn", [1, 2])
@pytest.mark.parametrize("layer", LAYERS)
def test_no_memory_for_a_turn_leaves_a_working_store(
    timed_store, experts, monkeypatch, turn, layer
):
    store, allocate, refused = timed_store(), LayerBank._allocate, []
    before, wanted = (LARGER, SMALLER) if turn == 1 else (SMALLER, LARGER)

    def scarce(bank, slots):
        if bank is store._layers[layer].bank and slots == wanted[layer] and not refused:
            refused.append(slots)
            raise RuntimeError("[malloc] Unable to allocate 1000 bytes.")
        return allocate(bank, slots)

    steps(store, FIRST if turn == 2 else 1)
    monkeypatch.setattr(LayerBank, "_allocate", scarce)
    assert steps(store, 4 * LATER, experts)[-1] == before
    assert refused
    assert store.timed_budget.report().endswith(
        ": no memory was left for " + ("82.9 kB" if turn == 1 else "152 kB")
    )
    all_is_well(store, experts)


def test_another_error_of_a_turn_is_not_hidden(timed_store, experts, monkeypatch):
    store, allocate = timed_store(), LayerBank._allocate

    def broken(bank, slots):
        patch.undo()
        raise RuntimeError("a bug")

    steps(store, FIRST - 1)
    with monkeypatch.context() as patch:
        patch.setattr(LayerBank, "_allocate", broken)
        with pytest.raises(RuntimeError, match="a bug"):
            steps(store, 1)
        assert LayerBank._allocate is allocate
    steps(store, 5 * LATER, experts)
    all_is_well(store, experts)


@pytest.mark.parametrize(
    ("turn", "error"),
    [
        pytest.param(turn, error, id=f"{turn}-error{i}", marks=[pytest.mark.slow] * (turn != i + 1))
        for turn in (1, 2)
        for i, error in enumerate((ExpertFileError("gone"), KeyboardInterrupt()))
    ],
)
def test_a_read_that_fails_in_a_turn_leaves_a_working_store(timed_store, experts, error, turn):
    failing = []

    def before(layer, expert, into):
        if failing:
            into[0][:8] = b"\xff" * 8
            raise error

    store = timed_store(before=before)
    store.preload()
    steps(store, FIRST + (turn - 1) * LATER - 1)
    call = random_call(1)
    needed = call[1][0].tolist()
    for layer in LAYERS:  # hits, so that only the turn reads
        store.read_missing(layer, needed, protected=needed)
    failing.append(True)
    store.experts(3, *call)
    if isinstance(error, ExpertFileError):
        store.experts(5, *call)
        assert store.slots == (SMALLER if turn == 1 else LARGER)
    else:
        with pytest.raises(KeyboardInterrupt):
            store.experts(5, *call)
    failing.clear()
    steps(store, 6 * LATER, experts)
    all_is_well(store, experts)


class AsSet(TimedBudget):
    """Wants what it is set to want."""

    def step(self, pairs, cost): ...

    def disturb(self): ...


@pytest.mark.slow
def test_interrupted_at_every_line_of_a_turn(timed_store, experts):
    # Not the store itself: a tracer raises where an interrupt cannot, before a lock is released.
    folder = os.path.join(os.path.dirname(package.__file__), "streaming")
    files = tuple(os.path.join(folder, name) for name in ("bank.py", "layer.py", "slots.py"))
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

    store, lines, finished = timed_store(), 0, 0
    trial = store.timed_budget
    store._trial.timed = trial = AsSet(trial.larger, trial.smaller, pairs=K)
    held = store.experts(5, *random_call(1, seed=99))
    while finished < 2:
        lines += 3
        for wanted in (trial.smaller, trial.larger):
            trial.wanted, countdown = wanted, lines
            sys.settrace(tracer)
            try:
                steps(store, 1, seed=lines)
                finished += 1
            except KeyboardInterrupt:
                finished = 0
            finally:
                sys.settrace(None)
            assert bank_is_right(store, experts)
            assert steps(store, 2, experts)[-1] == wanted.slots
            for state in store._layers.values():
                assert state.bank.slots == state.table.slots
    assert same_bits(held, experts.resident().experts(5, *random_call(1, seed=99)))
    assert lines > 500

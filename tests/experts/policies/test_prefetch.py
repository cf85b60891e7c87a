"""Oracle: the resident store, bit for bit; rules worked by hand; the replay of recorded events."""

import os
import sys
import threading
import time

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux import experts as package
from mlx_moeflux.errors import ExpertFileError, InputError
from mlx_moeflux.experts.io.read_pool import Fetch
from mlx_moeflux.experts.io.readers import make_reader
from mlx_moeflux.experts.policies import prefetch
from mlx_moeflux.experts.policies.eviction import EVICTIONS
from mlx_moeflux.experts.policies.prefetch import (
    PREFETCHES,
    AutoLookAhead,
    LastToken,
    LookAhead,
    make_prefetch,
)
from mlx_moeflux.experts.policies.timed_switch import TimedSwitch
from mlx_moeflux.experts.streaming.store import StreamedStore
from mlx_moeflux.experts.telemetry.events import (
    Evict,
    Guess,
    Hit,
    PrefetchDrop,
    PrefetchEnd,
    PrefetchStart,
)
from mlx_moeflux.experts.telemetry.simulate import simulate
from mlx_moeflux.experts.telemetry.trace import Trace, TraceInfo, TraceWriter
from mlx_moeflux.loading import BUNDLED_MODEL, load_model, steps, stores
from mlx_moeflux.models.moe import RouterLookahead
from tests.devices import seen_as
from tests.experts.helpers import C, E, K, bank_is_right, prefetch_of, random_call, same_bits


class Fixed:
    """Always names the same."""

    name, looks_ahead, most = "fixed", False, None

    def __init__(self, *experts):
        self.experts = experts

    def requested(self, layer, experts, last): ...

    def propose(self, layer, guess):
        return self.experts

    def reset(self): ...


def ask(store, layer, *experts, **options):
    call = mx.ones((1, C)), mx.array([sorted(experts)], mx.uint32), mx.ones((1, len(experts)))
    return store.experts(layer, *call, **options)


def test_the_rules_by_hand():
    assert prefetch.next_layer((3, 5, 9), 3) == 5
    assert prefetch.next_layer((3, 5, 9), 9) == 3
    assert prefetch.next_layer((3,), 3) is None
    assert prefetch.merged([[4, 1], [2, 4], [9, 9]], 9) == (4, 2, 1)
    assert prefetch.blocks_ahead(Fixed(), [5, 1, 2, 7], {1, 8}, 9) == [5, 2, 7]
    assert prefetch.blocks_ahead(Fixed(), [5, 1, 2, 7], {1, 8}, 3) == [5, 2]
    assert prefetch.blocks_ahead(LookAhead(most=1), [5, 1, 2, 7], {1, 8}, 9) == [5]
    assert prefetch.blocks_ahead(LookAhead(most=0), [5], (), 9) == []


def test_the_last_token_is_remembered_by_layer():
    last = LastToken()
    last.requested(3, [1, 4, 0, 2], [5, 6, 7, 7])
    last.requested(5, [8], [0])
    last.requested(5, [], [])
    assert list(last.propose(3, ())) == [0, 2]
    assert list(last.propose(5, (1,))) == [8]
    last.reset()
    assert list(last.propose(3, ())) == []


def test_names_and_objects():
    mine = LastToken()
    assert make_prefetch(mine) is mine
    assert make_prefetch("none") is make_prefetch(None) is None
    assert make_prefetch("ahead").looks_ahead
    with pytest.raises(InputError, match="no prefetch is called 'all'; there are none, last"):
        make_prefetch("all")
    with pytest.raises(InputError, match="object has no 'requested'"):
        make_prefetch(object())


def test_events_and_counts_in_order(open_store, experts):
    events = []
    store = open_store(K, prefetch=Fixed(4, 2), keep_all_ahead=True, eviction="lru")
    ask(store, 5, 0, 1, 2)  # 4 and 2 on their way into layer 3
    store.events = lambda event: events.append(event)
    ask(store, 3, 2, 5, 6)
    names = " ".join(type(e).__name__ for e in events)
    assert names == (
        "Chosen PrefetchEnd PrefetchEnd Hit Miss Miss Evict ReadStart ReadStart ReadEnd ReadEnd "
        # Layer 5 has 0, 1, 2: its 2 stays, who is oldest leaves for 4.
        "Evict PrefetchStart"
    )
    assert events[1][:2] == (3, 4)
    assert events[3] == Hit(3, 2, prefetched=True)
    assert events[-2][:2] == (5, 0)
    assert events[-1][:2] == (5, 4)
    stats = store.stats().layers[3]
    assert (stats.hits, stats.misses, stats.prefetches, stats.prefetched_hits) == (1, 2, 2, 1)
    assert (stats.proposed, stats.foreseen, stats.reads) == (2, 1, 4)
    ask(store, 3, 2, 5, 6)
    assert store.stats().layers[3].prefetched_hits == 1
    assert bank_is_right(store, experts)
    assert "read ahead 2, of which 1 used" in str(store.stats())


def test_what_is_not_needed_and_not_begun_is_given_up(wrapped, experts, monkeypatch):
    begun, given_up, dropped, abandon = threading.Event(), threading.Event(), [], Fetch.abandon

    def before(layer, expert, into):
        if layer == 5 and not begun.is_set():
            begun.set()
            assert given_up.wait(60)

    def noted(fetch):
        abandon(fetch)
        dropped.append(fetch)
        if len(dropped) == 2:
            given_up.set()

    monkeypatch.setattr(Fetch, "abandon", noted)
    slow = wrapped(before, slots=4, prefetch=Fixed(0, 1, 2), threads=1)
    events = []
    slow.events = lambda e: events.append(e) if isinstance(e, PrefetchDrop) else None
    ask(slow, 3, 4, 5, 6)
    assert begun.wait(10)
    right = experts.resident()
    assert same_bits(ask(slow, 5, 2, 4, 5), ask(right, 5, 2, 4, 5))
    assert [e.expert for e in events] == [1]  # 0 had begun, 2 was needed
    assert slow.stats().layers[5].prefetched_hits == 1
    assert slow._layers[5].table.free + len(slow.residents(5)) == 4
    assert bank_is_right(slow, experts)


@pytest.mark.parametrize(
    ("name", "eviction", "keep"),
    [
        pytest.param(name, eviction, keep, marks=() if keep == (i + j) % 2 else pytest.mark.slow)
        for i, name in enumerate(PREFETCHES)
        for j, eviction in enumerate(EVICTIONS)
        for keep in (False, True)
    ],
)
def test_no_bit_changes(open_store, experts, name, eviction, keep):
    options = {"eviction": eviction, "prefetch": prefetch_of(name), "keep_all_ahead": keep}
    store, resident = open_store(4, **options), experts.resident()
    random = np.random.default_rng(0)
    for seed, n in enumerate((1, 1, 2, 1, 30, 1, 1, 1, 3, 1)):
        for layer in (3, 5):
            call = random_call(n, seed=10 * seed + layer)
            ahead = np.stack([random.permutation(E)[:K] for _ in range(n)]).astype(np.uint32)
            more = {"ahead": mx.array(ahead)} if store.looks_ahead and layer == 3 else {}
            assert same_bits(store.experts(layer, *call, **more), resident.experts(layer, *call))
    assert store.stats().total.proposed > 0
    assert bank_is_right(store, experts)


@pytest.mark.parametrize("name", PREFETCHES)
def test_a_model_gives_the_same_bits(two_bundled_layers, name):
    with (
        load_model(two_bundled_layers) as resident,
        load_model(two_bundled_layers, expert_memory="20%", prefetch=prefetch_of(name)) as model,
    ):
        a, b = resident.make_cache(), model.make_cache()
        random = np.random.default_rng(0)
        for T in (30, 1, 1, 4, 1, 1):
            tokens = mx.array(random.integers(0, 4096, (1, T)))
            assert mx.array_equal(resident(tokens, a), model(tokens, b))
        assert model.store.stats().total.proposed > 0


def test_the_guess_is_the_next_router_on_the_present_state():
    guesses = {}

    def listen(event):
        if isinstance(event, Guess):
            guesses[event.layer] = event.experts

    with (
        load_model(BUNDLED_MODEL, expert_memory="50%", prefetch="ahead", events=listen) as model,
        model.record(names=["h_mid"]) as kept,
    ):
        mx.eval(model(mx.array([[17]])))
        assert sorted(guesses) == [1, 2, 3, 4, 5]
        for layer, guess in guesses.items():
            following = model.layers[layer]
            hidden = kept[layer - 1]["h_mid"][0]
            logits = following.mlp.gate(following.post_attention_layernorm(hidden))[0]
            order = np.argsort(-np.array(logits), kind="stable")
            assert guess == tuple(order[:4].tolist())


def test_padding_guesses_nothing(two_bundled_layers):
    guesses = []
    with load_model(two_bundled_layers, expert_memory="50%", prefetch="ahead") as model:
        caches = [model.make_cache(), model.make_cache()]
        merged = [type(row[0]).merge(list(row)) for row in zip(*caches, strict=True)]
        for entry in merged:
            entry.prepare(lengths=[2, 1], right_padding=[0, 1])
        model.store.events = lambda e: guesses.append(e) if isinstance(e, Guess) else None
        mx.eval(model(mx.array([[5, 6], [7, 0]]), merged))
    assert guesses
    assert all(32 not in g.experts and len(g.experts) <= 12 for g in guesses)


class Noted(TimedSwitch):
    """Notes what it is told, and is as it is set."""

    def __init__(self):
        super().__init__()
        self.told.clear()

    def step(self, pairs, cost):
        self.told.append((pairs, cost))

    def disturb(self):
        self.told.append("disturbed")

    def reset(self):
        super().reset()
        self.told = ["reset"]


def noted():
    prefetch = AutoLookAhead()
    prefetch.switch = Noted()
    return prefetch


def test_a_switch_is_told_of_decode_steps_alone(monkeypatch):
    prefetch, asked = noted(), []
    original = RouterLookahead.__call__
    monkeypatch.setattr(RouterLookahead, "__call__", lambda *a: asked.append(1) or original(*a))
    with load_model(BUNDLED_MODEL, expert_memory="40%", prefetch=prefetch) as model:
        told, cache = prefetch.switch.told, model.make_cache()
        for T in (30, 1, 1, 1, 2):
            mx.eval(model(mx.array([[5] * T]), cache))
        assert not asked
        assert model.store.stats().total.proposed == 0
        prompt, steps = told[:-4], told[-4:]
        assert set(prompt) == {"disturbed"}
        assert [pairs for pairs, _ in steps] == [4, 4, 4, 8]
        assert all(cost.seconds > cost.stalled >= 0 for _, cost in steps)
        prefetch.switch.on = True
        mx.eval(model(mx.array([[6]]), cache))
        assert len(asked) == 5
        assert model.store.stats().total.proposed > 0
        model.set_expert_memory("60%")
        assert prefetch.switch.told == ["reset"]
        assert not prefetch.switch.on


def test_a_call_that_fails_is_no_decode_step(wrapped):
    def before(layer, expert, into):
        if broken and layer == 5:
            raise OSError(5, "Input/output error")

    broken, prefetch = True, noted()
    store = wrapped(before, prefetch=prefetch)
    ask(store, 3, 0, 1, 2)
    with pytest.raises(ExpertFileError):
        ask(store, 5, 0, 1, 2)
    broken = False
    ask(store, 5, 0, 1, 2)
    assert prefetch.switch.told == ["disturbed"]
    ask(store, 3, 0, 1, 2)
    ask(store, 5, 0, 1, 2)
    assert [pairs for pairs, _ in prefetch.switch.told[1:]] == [3]


def test_what_was_proposed_before_the_switch_went_off_is_entered(open_store, experts):
    prefetch = noted()
    store = open_store(4, prefetch=prefetch)
    prefetch.switch.on = True
    ask(store, 3, 4, 5, 6, ahead=mx.array([[0, 1, 2]], mx.uint32))
    prefetch.switch.on = False
    assert same_bits(ask(store, 5, 0, 1, 2), ask(experts.resident(), 5, 0, 1, 2))
    stats = store.stats().layers[5]
    assert (stats.prefetches, stats.prefetched_hits, stats.proposed) == (2, 2, 3)
    assert bank_is_right(store, experts)


@pytest.mark.parametrize("name", PREFETCHES)
def test_a_complete_layer_stays_on_the_device(open_store, name):
    store = open_store({3: E, 5: 4}, prefetch=prefetch_of(name))
    store.preload([3])
    assert store.partial() == (5,)
    ask(store, 3, 0, 1, 2)
    ask(store, 5, 0, 1, 2)
    assert store.stats().layers[3].lookups == 0
    store.resize(5, E)
    store.preload()
    assert store.stays_on_device


def test_a_model_that_cannot_look_ahead_has_no_auto(two_bundled_layers, monkeypatch):
    with load_model(two_bundled_layers, expert_memory="40%", prefetch="auto") as model:
        assert model.store.prefetch.name == "auto"
        kind = type(model)
    monkeypatch.setattr(kind, "CAN_LOOK_AHEAD", False)
    with load_model(two_bundled_layers, expert_memory="40%", prefetch="auto") as model:
        assert model.store.prefetch is None


@pytest.mark.parametrize(
    ("kind", "options", "name"),
    [
        ("metal", {}, "auto"),
        ("metal", {"prefetch": "none"}, None),
        ("metal", {"prefetch": "ahead"}, "ahead"),
        ("metal", {"safe": True}, None),
        ("metal", {"handshake": True}, None),
        ("cuda", {}, None),
        ("cpu", {}, None),
    ],
)
def test_the_default(two_bundled_layers, monkeypatch, kind, options, name):
    monkeypatch.setattr(steps, "device", seen_as(kind))
    monkeypatch.setattr(stores.handshake_trial, "refusal", lambda: "nobody has an Apple GPU here")
    with load_model(two_bundled_layers, expert_memory="40%", fuse=False, **options) as model:
        found = model.store.prefetch
        assert (found and found.name) == name


def test_a_replay_of_recorded_events_where_time_decides(tmp_path, wrapped):
    random = np.random.default_rng(0)
    store = wrapped(lambda *_: time.sleep(0.002), slots=4, prefetch=LookAhead(most=None), threads=1)
    with TraceWriter(tmp_path / "x", TraceInfo.of(store, experts_per_token=K)) as writer:
        store.events = writer
        for _ in range(25):
            ahead = mx.array(random.permutation(E)[None, :K].astype(np.uint32))
            ask(store, 3, *random.permutation(E)[:K].tolist(), ahead=ahead)
            ask(store, 5, *random.permutation(E)[:K].tolist())
    trace = Trace.open(tmp_path / "x")
    assert trace.info.prefetch == "ahead"
    assert sum(len(call.dropped) for call in trace) > 0
    replayed = simulate(trace, {3: 4, 5: 4}, prefetch=LookAhead(None), recorded=True)
    live = store.stats()
    for layer in (3, 5):
        for name in ("hits", "misses", "evictions", "prefetches", "prefetched_hits", "foreseen"):
            assert getattr(replayed.layers[layer], name) == getattr(live.layers[layer], name)


@pytest.mark.parametrize("keep", [False, True])
def test_a_read_ahead_that_fails_is_forgotten_unless_needed(wrapped, experts, keep):
    def before(layer, expert, into):
        if broken and expert == 1:
            into[0][:8] = b"\xff" * 8
            raise OSError(5, "Input/output error")

    broken, right = True, experts.resident()
    store = wrapped(before, prefetch=Fixed(0, 1), keep_all_ahead=keep)
    ask(store, 3, 4, 5, 6)
    assert same_bits(ask(store, 5, 0, 4, 5), ask(right, 5, 0, 4, 5))
    assert 1 not in store.residents(5)
    ask(store, 3, 4, 5, 6)
    with pytest.raises(ExpertFileError, match="expert 1 of layer 5"):
        ask(store, 5, 1, 4, 5)
    broken = False
    assert same_bits(ask(store, 5, 1, 4, 5), ask(right, 5, 1, 4, 5))
    assert bank_is_right(store, experts)


@pytest.mark.parametrize("proposal", [(1, 1), (0, E), (-1,)])
def test_a_prefetcher_is_held_to_its_contract(open_store, experts, proposal):
    store = open_store(4, prefetch=Fixed(*proposal))
    with pytest.raises(InputError, match=r"fixed proposed .* for layer 5; expected different"):
        ask(store, 3, 4, 5, 6)
    store.prefetch = None
    assert same_bits(ask(store, 5, 0, 4, 5), ask(experts.resident(), 5, 0, 4, 5))
    assert bank_is_right(store, experts)


def test_a_bug_in_a_reader_is_not_hidden(wrapped, experts):
    def before(layer, expert, into):
        if bug and layer == 5:
            raise KeyError("a bug")

    bug, store = True, wrapped(before, prefetch=Fixed(0))
    ask(store, 3, 4, 5, 6)
    with pytest.raises(KeyError, match="a bug"):
        ask(store, 5, 0, 4, 5)
    bug = False
    assert same_bits(ask(store, 5, 0, 4, 5), ask(experts.resident(), 5, 0, 4, 5))
    assert bank_is_right(store, experts)


@pytest.mark.parametrize("action", ["resize", "preload", "close", "residents", "smaller"])
def test_anything_may_come_while_blocks_are_on_their_way(wrapped, experts, action):
    store = wrapped(lambda *_: time.sleep(0.005), slots=4, prefetch=Fixed(0, 1), threads=1)
    ask(store, 3, 4, 5, 6)
    assert store._layers[5].reading_ahead
    if action == "close":
        store.close()
        return
    if action == "resize":
        store.resize(5, E)
    elif action == "smaller":
        store.resize(5, K)
    elif action == "preload":
        store.preload()
    else:
        assert store.residents(5) == {}
    assert same_bits(ask(store, 5, 0, 4, 5), ask(experts.resident(), 5, 0, 4, 5))
    assert bank_is_right(store, experts)


def two_layers(store, seed):
    """Both layers of one token, each with a guess; the results."""
    random = np.random.default_rng(seed)
    first, second = (random_call(1, seed=seed + i) for i in (0, 100))
    guess = mx.array(random.permutation(E)[None, :K].astype(np.uint32))
    ahead = {"ahead": guess} if isinstance(store, StreamedStore) else {}
    return store.experts(3, *first, **ahead), store.experts(5, *second, **ahead)


@pytest.mark.parametrize(
    "kind",
    [
        *(Guess, PrefetchEnd, PrefetchDrop),
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in (PrefetchStart, Evict, Hit)),
    ],
)
def test_interrupted_at_any_event(experts, wrapped, kind):
    armed = 0

    def listener(event):
        nonlocal armed
        if isinstance(event, kind) and armed:
            armed -= 1
            if not armed:
                raise KeyboardInterrupt

    store = wrapped(
        lambda *_: time.sleep(0.0005), events=listener, prefetch=LookAhead(None), threads=1
    )
    interrupted, right = 0, experts.resident()
    for nth in (1, 2, 3):
        for seed in range(12):
            armed = nth
            try:
                two_layers(store, seed)
            except KeyboardInterrupt:
                interrupted += 1
            armed = 0
            for a, b in zip(two_layers(store, seed), two_layers(right, seed), strict=True):
                assert same_bits(a, b)
            assert bank_is_right(store, experts)
    assert interrupted > 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ahead", "auto"])
def test_interrupted_at_every_line(experts, name):
    """KeyboardInterrupt at the n-th line that the store's code executes, for n = 1, 2, ..."""
    folder, countdown = os.path.dirname(package.__file__), 0

    def tracer(frame, event, argument):
        nonlocal countdown
        if not frame.f_code.co_filename.startswith(folder):
            return None
        if event == "line":
            countdown -= 1
            if countdown == 0:
                raise KeyboardInterrupt
        return tracer

    right = [two_layers(experts.resident(), seed) for seed in (0, 1)]
    lines, finished = 0, False
    reader = make_reader("pread", experts.refs)
    with StreamedStore(reader, 4, threads=2, prefetch=prefetch_of(name)) as store:
        while not finished:
            lines += 5
            countdown = lines
            sys.settrace(tracer)
            try:
                two_layers(store, 0)
                finished = True
            except KeyboardInterrupt:
                pass
            finally:
                sys.settrace(None)
            for seed in (1, 0):
                for a, b in zip(two_layers(store, seed), right[seed], strict=True):
                    assert same_bits(a, b)
            assert bank_is_right(store, experts)
            for state in store._layers.values():
                on_the_way = len(state._ahead)
                assert state.table.free + len(state.table) + on_the_way == state.table.slots
    assert lines > 300

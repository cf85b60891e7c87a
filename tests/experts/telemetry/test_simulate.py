"""Oracle: the live store, whose hits a replay must give exactly; exhaustive search for Belady;
sums by hand for the rest."""

import itertools
import subprocess
import sys
import time
from collections import OrderedDict

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_moeflux.errors import InputError, MemoryBudgetError
from mlx_moeflux.experts.policies.eviction import EVICTIONS, LRU
from mlx_moeflux.experts.policies.prefetch import PREFETCHES, LastToken
from mlx_moeflux.experts.telemetry.bounds import (
    Belady,
    coactivation,
    compulsory,
    independent,
    popularity,
    reuse_distances,
    shuffled,
)
from mlx_moeflux.experts.telemetry.forecast import Profile, forecast
from mlx_moeflux.experts.telemetry.simulate import simulate, slots_of
from mlx_moeflux.experts.telemetry.trace import Call, Trace, TraceInfo, TraceWriter
from mlx_moeflux.loading import BUNDLED_MODEL, load_model
from tests.experts.helpers import (
    C,
    EveryOther,
    K,
    prefetch_of,
    random_call,
    random_experts,
    write_experts,
)
from tests.experts.zipf import zipf_trace

COUNTED = ["lookups", "hits", "misses", "evictions", "bytes_read", "prefetches"]
COUNTED += ["prefetched_hits", "proposed", "foreseen"]
PREFETCH = ["none", *PREFETCHES]
BUDGETS = ["12.5%", "20%", "45%", "95%"]


def pairwise(evictions, sizes, prefetches):
    """All combinations; by default each size has one of the evictions and prefetches."""
    numbered = itertools.product(*map(enumerate, (evictions, sizes, prefetches)))
    return [
        pytest.param(
            eviction,
            size,
            prefetch,
            marks=() if (i, k) == (j % len(evictions), j % len(prefetches)) else pytest.mark.slow,
        )
        for (i, eviction), (j, size), (k, prefetch) in numbered
    ]


@pytest.mark.parametrize("module", ["simulate", "bounds", "forecast", "trace"])
def test_replaying_loads_no_mlx(module):
    code = f"import sys, mlx_moeflux.experts.telemetry.{module}; sys.exit('mlx' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def same_counts(live, simulated):
    """All layers of two accounts agree, number by number."""
    for layer, counts in simulated.layers.items():
        stats = live.layers[layer]
        for name in COUNTED:
            assert getattr(counts, name) == getattr(stats, name), (layer, name)
    return True


@pytest.mark.parametrize(("eviction", "memory", "prefetch"), pairwise(EVICTIONS, BUDGETS, PREFETCH))
def test_live_is_simulated_on_two_layers(two_bundled_layers, tmp_path, eviction, memory, prefetch):
    random = np.random.default_rng(3)
    options = {"eviction": eviction, "prefetch": prefetch_of(prefetch)}
    with load_model(
        two_bundled_layers, expert_memory=memory, keep_all_ahead=True, **options
    ) as model:
        with model.trace(tmp_path / "x"):
            cache = model.make_cache()
            for T in (9, *[1] * 5, 4, *[1] * 3):
                mx.eval(model(mx.array(random.integers(0, 4096, (1, T))), cache))
        live = model.store.stats().snapshot()
    trace = Trace.open(tmp_path / "x")
    replayed = simulate(trace, memory, **options)
    assert replayed.slots == trace.info.slots
    assert replayed.total.misses > 0
    assert prefetch == "none" or replayed.total.proposed > 0
    assert same_counts(live, replayed)
    recorded = trace.recorded()
    total = replayed.total
    assert (recorded.hits, recorded.misses) == (total.hits, total.misses)


@pytest.fixture(scope="module")
def many_experts(tmp_path_factory):
    experts = random_experts(num_experts=24)
    return write_experts(tmp_path_factory.mktemp("many"), experts, "packed")


@pytest.mark.parametrize(
    ("eviction", "slots", "prefetch"), pairwise(EVICTIONS, [K, 6, {3: 11, 5: 5}, 23], PREFETCH)
)
def test_live_is_simulated_on_a_skewed_router(tmp_path, many_experts, eviction, slots, prefetch):
    """Prompts that sweep among the decode steps, layers of different sizes, padding; guesses that
    are right two times in three."""
    from mlx_moeflux.experts.io.readers import make_reader
    from mlx_moeflux.experts.streaming.store import StreamedStore

    source = zipf_trace(
        num_experts=24, experts_per_token=K, layers=2, tokens=40, skew=1.2, prompt=20, seed=4
    )
    reader, random = make_reader("pread", many_experts.refs), np.random.default_rng(1)
    options = {"eviction": eviction, "prefetch": prefetch_of(prefetch)}
    with StreamedStore(reader, slots, keep_all_ahead=True, **options) as store:
        with TraceWriter(tmp_path / "x", TraceInfo.of(store, experts_per_token=K)) as writer:
            store.events = writer
            for i, call in enumerate(source):
                N, ahead = len(call.ids), None
                if store.looks_ahead and call.layer == 0 and N == 1:
                    ahead = random.permutation(source.calls[i + 1].ids[0])
                    wrong = random.integers(24)
                    if wrong not in ahead:
                        ahead[random.integers(K)] = wrong
                    ahead = mx.array(ahead[None].astype(np.uint32))
                ids = call.ids.astype(np.uint32)
                if N == 1 and call.token % 7 == 0:
                    ids[0, -1] = 24
                more = {} if ahead is None else {"ahead": ahead}
                layer, ids = (3, 5)[call.layer], mx.array(ids)
                store.experts(layer, mx.ones((N, C)), ids, mx.ones((N, K)), **more)
        live = store.stats().snapshot()
        trace = Trace.open(tmp_path / "x")
        replayed = simulate(trace, store.slots, **options)
    assert same_counts(live, replayed)
    if prefetch == "ahead":
        assert 0.4 < replayed.total.foreseen / replayed.total.proposed < 0.9


@pytest.mark.parametrize(
    ("eviction", "slots", "prefetch"), pairwise(EVICTIONS, [K, 6, {3: 13, 5: 9}, 20], PREFETCH)
)
def test_live_is_simulated_where_a_prompt_begins_the_next_layer(
    tmp_path, many_experts, eviction, slots, prefetch
):
    """Prompts that need most experts, some of which the next layer does not need, decode steps,
    calls between two layers of a prompt, and a change of size."""
    from mlx_moeflux.experts.io.readers import make_reader
    from mlx_moeflux.experts.streaming.store import StreamedStore

    calls = [(n, layer) for n in (18, 1, 30, 1, 2, 17, 24, 1) for layer in (3, 5)]
    calls[4:4] = [(22, 3), (1, 3), (1, 5), (30, 3)]
    options = {"eviction": eviction, "prefetch": prefetch_of(prefetch)}
    reader = make_reader("pread", many_experts.refs)
    with StreamedStore(reader, slots, keep_all_ahead=True, **options) as store:
        with TraceWriter(tmp_path / "x", TraceInfo.of(store, experts_per_token=K)) as writer:
            store.events = writer
            for seed, (n, layer) in enumerate(calls * 2):
                x, ids, weights = random_call(n, num_experts=24, seed=seed, padding=n // 9)
                ahead = {"ahead": ids[:, ::-1]} if store.looks_ahead and n * K <= 64 else {}
                store.experts(layer, x, ids, weights, **ahead)
                if seed == len(calls) + 8:
                    assert store._layers[5].early
                    store.resize(5, store.slots[5] + (1 if store.slots[5] == K else -1))
            store.experts(5, x, ids, weights)  # so that everything that was begun is entered
        live = store.stats().snapshot()
    trace = Trace.open(tmp_path / "x")
    replayed = simulate(trace, trace.info.slots, recorded=True, **options)
    assert same_counts(live, replayed)
    assert replayed.layers[5].prefetches > replayed.layers[5].prefetched_hits > 0
    recorded, total = trace.recorded(), replayed.total
    counts = recorded.hits, recorded.misses, recorded.prefetched
    assert counts == (total.hits, total.misses, total.prefetched_hits)
    if prefetch == "none":
        assert sum(len(call.prefetches) for call in trace) == total.prefetches
        on_demand = sum(trace.info.block_bytes[call.layer] * call.result.misses for call in trace)
        assert recorded.nbytes == on_demand


@pytest.mark.slow
def test_live_is_simulated_when_the_budget_changes(tmp_path):
    budgets, options = ["15%", "70%", "40%", "100%"], {"eviction": "lfu", "prefetch": "ahead"}
    random = np.random.default_rng(3)
    with load_model(BUNDLED_MODEL, expert_memory="30%", keep_all_ahead=True, **options) as model:
        with model.trace(tmp_path / "x"):
            model.set_expert_memory("20%")
            cache = model.make_cache()
            for budget in budgets:
                for T in (3, 1, 1):
                    mx.eval(model(mx.array(random.integers(0, 4096, (1, T))), cache))
                model.set_expert_memory(budget)
        live = model.store.stats().snapshot()
    trace = Trace.open(tmp_path / "x")
    assert same_counts(live, simulate(trace, trace.info.slots, recorded=True, **options))


def test_live_is_simulated_with_a_switch_of_ones_own(two_bundled_layers, tmp_path):
    """A prefetcher that does not look ahead; the replay is on where the run was."""
    policy, random = LastToken(), np.random.default_rng(3)
    policy.switch = EveryOther()
    options = {"expert_memory": "25%", "eviction": "lfu", "keep_all_ahead": True}
    with load_model(two_bundled_layers, prefetch=policy, **options) as model:
        with model.trace(tmp_path / "x"):
            cache = model.make_cache()
            for T in (9, *[1] * 8):
                mx.eval(model(mx.array(random.integers(0, 4096, (1, T))), cache))
        live = model.store.stats().snapshot()
    trace = Trace.open(tmp_path / "x")
    assert live.total.proposed > 0
    assert {call.guess for call in trace} == {None, ()}
    replayed = simulate(trace, "25%", eviction="lfu", prefetch=policy)
    assert same_counts(live, replayed)
    without = simulate(trace, "25%", eviction="lfu", prefetch="last")
    assert without.total.proposed > replayed.total.proposed


def guessed(trace, right, seed=0):
    """Give `trace` guesses, each expert of which is right so often."""
    random, K = np.random.default_rng(seed), trace.info.experts_per_token
    for call, after in itertools.pairwise(trace.calls):
        if len(call.ids) == 1 and after.layer == call.layer + 1:
            wrong = random.permutation(np.setdiff1d(np.arange(trace.info.num_experts), after.ids))
            chosen = random.permutation(after.ids[0])
            call.guess = tuple(np.where(random.random(K) < right, chosen, wrong[:K]).tolist())
    return trace


def against_the_better(trace, budget, profile):
    """Seconds of a token with ``auto`` by those of the better of ``none`` and ``ahead``."""
    cost = profile.call_cost(len(trace.info.layers))
    seconds = {
        name: forecast(trace, simulate(trace, budget, prefetch=name, cost=cost), profile).seconds
        for name in ("none", "ahead", "auto")
    }
    return seconds["auto"] / min(seconds["none"], seconds["ahead"])


DISKS = [1, 3, 5, 7]  # GB/s
BLOCK = 1_769_472  # bytes, of the 35B's experts in 4 bits


@pytest.mark.parametrize("disk", [1, 7])
def test_auto_is_nearly_as_good_as_the_better_of_both(disk):
    """Looking ahead costs 22 % on the slow disk, and gains 7 % on the fast one."""
    shape = {"num_experts": 32, "experts_per_token": 4, "layers": 4}
    trace = guessed(zipf_trace(**shape, tokens=1000, skew=0.7, block_bytes=BLOCK), 0.75)
    profile = Profile.of_disk(disk, BLOCK, token_seconds=4 * 0.4e-3)
    assert against_the_better(trace, "25%", profile) < 1.02


@pytest.mark.slow
@pytest.mark.parametrize("disk", DISKS)
@pytest.mark.parametrize("layer_seconds", [0.4e-3, 0.1e-3])
@pytest.mark.parametrize("skew", [0.5, 1.0])
def test_auto_is_nearly_as_good_on_the_shape_of_the_35b(disk, layer_seconds, skew):
    shape = {"num_experts": 256, "experts_per_token": 8, "layers": 40}
    trace = guessed(zipf_trace(**shape, tokens=600, skew=skew, block_bytes=BLOCK), 0.7)
    profile = Profile.of_disk(disk, BLOCK, token_seconds=40 * layer_seconds)
    assert against_the_better(trace, "25%", profile) < 1.02


@pytest.fixture(scope="module")
def own_text(tmp_path_factory):
    """A trace of the bundled model that writes, with the guesses of all steps."""
    from mlx_moeflux import load, stream_generate
    from mlx_moeflux.generation.sampling import make_sampler

    file = tmp_path_factory.mktemp("own") / "x"
    mx.random.seed(5)
    model, tokenizer = load(BUNDLED_MODEL, expert_memory="25%", prefetch="ahead")
    with model, model.trace(file):
        for prompt in ("def main(argv):", "class Reader:", "import os", "# sort a list"):
            options = {"max_tokens": 300, "sampler": make_sampler(0.8)}
            for _ in stream_generate(model, tokenizer, prompt, **options):
                pass
    return Trace.open(file)


@pytest.mark.slow
@pytest.mark.parametrize("disk", DISKS)
@pytest.mark.parametrize("layer_seconds", [0.4e-3, 0.1e-3])
def test_auto_is_nearly_as_good_on_the_bundled_model(own_text, disk, layer_seconds):
    profile = Profile.of_disk(disk, BLOCK, token_seconds=6 * layer_seconds)
    assert against_the_better(own_text, "25%", profile) < 1.02


def trace_of(*rows, num_experts=9, layer=0):
    """One call of one layer for each row of experts."""
    rows = [np.array([sorted(row)], np.uint16) for row in rows]
    K = max(row.shape[1] for row in rows)
    info = TraceInfo(num_experts, K, (layer,), {layer: 10})
    return Trace(info, [Call(layer, t, row, np.ones(row.shape)) for t, row in enumerate(rows)])


def fewest_misses(rows, slots):
    """By trying every choice of victims."""
    states = {frozenset(): 0}
    for row in rows:
        needed, following = frozenset(row), {}
        for resident, misses in states.items():
            cost = misses + len(needed - resident)
            others = resident - needed
            keep = min(len(others), slots - len(needed))
            for kept in itertools.combinations(sorted(others), keep):
                state = needed | set(kept)
                following[state] = min(cost, following.get(state, cost))
        states = following
    return min(states.values())


rows = st.lists(
    st.sets(st.integers(0, 6), min_size=2, max_size=2).map(tuple), min_size=1, max_size=14
)


@given(rows=rows, slots=st.integers(2, 5))
@settings(max_examples=60)
def test_belady_is_the_best_that_is_possible(rows, slots):
    trace = trace_of(*rows)
    best = simulate(trace, {0: slots}, eviction="belady")
    assert best.total.misses == fewest_misses(rows, slots)
    for eviction in EVICTIONS:
        assert simulate(trace, {0: slots}, eviction=eviction).total.misses >= best.total.misses


def test_belady_by_hand():
    trace = trace_of([1], [2], [3], [1], [2], [3])
    assert simulate(trace, {0: 2}, eviction="belady").misses == [1, 1, 1, 0, 1, 0]
    assert simulate(trace, {0: 2}, eviction="lru").misses == [1] * 6
    assert simulate(trace, {0: 2}, eviction=Belady(trace)).eviction == "belady"


def test_a_policy_object_is_reset_before_each_replay():
    trace = trace_of([1], [2], [1], [3])
    policy = LRU()
    first = simulate(trace, {0: 2}, eviction=policy)
    assert first.misses == simulate(trace, {0: 2}, eviction=policy).misses == [1, 1, 0, 1]
    assert str(first) == "lru: hit rate 25.0 % of 4, 0.000 GB read"
    assert first.total.bytes_read == 30


def test_compulsory_misses_are_those_of_a_bank_that_holds_all():
    trace = zipf_trace(num_experts=20, experts_per_token=3, layers=2, tokens=30, prompt=4)
    assert compulsory(trace) == simulate(trace, "100%").total.misses
    different = {(call.layer, e) for call in trace for e in call.ids.reshape(-1).tolist()}
    assert compulsory(trace) == len(different)


def test_budgets_are_those_of_loading():
    trace = zipf_trace(num_experts=20, experts_per_token=3, layers=2, tokens=1, block_bytes=10)
    assert slots_of(trace, "50%") == {0: 10, 1: 10}
    assert slots_of(trace, 75) == {0: 4, 1: 3}
    with pytest.raises(MemoryBudgetError, match="smallest budget that works is 60"):
        slots_of(trace, "1%")
    with pytest.raises(MemoryBudgetError, match="layer 1 cannot have 2 slots"):
        slots_of(trace, {0: 3, 1: 2})
    with pytest.raises(InputError, match="needs a budget in numbers"):
        slots_of(trace, "auto")
    with pytest.raises(InputError, match="'mru'; there are lru, lfu, belady"):
        simulate(trace, "50%", eviction="mru")
    for options in ({"prefetch": "ahead"}, {"prefetch": "auto", "cost": lambda *blocks: None}):
        with pytest.raises(InputError, match="no guesses to look ahead with"):
            simulate(trace, "50%", **options)


def test_baselines_keep_what_they_say():
    trace = zipf_trace(
        num_experts=40, experts_per_token=4, layers=2, tokens=400, prompt=9, persistence=0.5
    )
    before = popularity(trace)
    mixed = shuffled(trace, 1)
    assert [len(c.ids) for c in mixed] == [len(c.ids) for c in trace]
    for layer, counts in popularity(mixed).items():
        assert (counts == before[layer]).all()
    real, without = simulate(trace, "25%").hit_rate, simulate(mixed, "25%").hit_rate
    drawn = independent(trace, 1)
    even = independent(trace, 1, uniform=True)
    for other in (drawn, even):
        for call in other:
            assert (np.diff(call.ids.astype(int)) > 0).all()
    for layer, counts in popularity(drawn).items():
        assert np.corrcoef(counts, before[layer])[0, 1] > 0.95
    assert real > without + 0.1
    assert abs(without - simulate(drawn, "25%").hit_rate) < 0.05
    # Without order and preference a bank hits by its share of the experts, whoever must leave.
    for eviction in EVICTIONS:
        assert abs(simulate(even, "25%", eviction=eviction).hit_rate - 0.25) < 0.03


def test_coactivation_is_counted_token_by_token():
    trace = zipf_trace(num_experts=9, experts_per_token=3, layers=2, tokens=30, prompt=7)
    trace.calls[2].ids[0, 2] = 9  # padding
    found = coactivation(trace)
    for layer in range(2):
        expected = np.zeros((9, 9), int)
        for call in trace:
            for row in call.ids.tolist() if call.layer == layer else ():
                chosen = [e for e in row if e < 9]
                for a in chosen:
                    for b in chosen:
                        expected[a, b] += 1
        assert np.array_equal(found[layer], expected)
        assert np.array_equal(np.diag(found[layer]), popularity(trace)[layer])


def test_too_many_pairs_are_one_line():
    info = TraceInfo(60_000, 1, (0,), {0: 1})
    with pytest.raises(InputError, match="the trace has 3600000000 pairs of experts, 60000 x"):
        coactivation(Trace(info))


def test_reuse_distances_by_hand():
    trace = trace_of([1], [2], [2], [3], [1], [3])
    assert reuse_distances(trace).tolist() == [-1, -1, 0, -1, 2, 1]


def test_forecast_by_hand(tmp_path):
    profile = Profile(0.010, 0.001, (0.002, 0.003))
    assert [profile.reading(n) for n in range(5)] == [0, 0.002, 0.003, 0.004, 0.005]
    profile.save(tmp_path / "p.json")
    assert Profile.open(tmp_path / "p.json") == profile
    trace = trace_of([1, 2], [1, 3], [1, 3], [4, 5])
    result = forecast(trace, simulate(trace, {0: 2}), profile)
    assert result.tokens == 4
    assert result.demand == pytest.approx((0.003 + 0.002 + 0 + 0.003) / 4)
    assert result.sync == 0.001
    assert result.seconds == pytest.approx(0.010 + 0.001 + 0.002)
    assert result.tokens_per_second == pytest.approx(1 / 0.013)
    full = forecast(trace, simulate(trace, "100%"), profile)
    assert full.sync == 0
    ahead = simulate(trace, {0: 2})
    ahead.ahead = [0, 1, 5, 0]
    result = forecast(trace, ahead, Profile(0.0021, 0, (0.002, 0.003)))
    assert result.hidden == pytest.approx((0.002 + 0.0021) / 4)
    assert result.ahead == pytest.approx((0.006 - 0.0021) / 4)
    cost = Profile(0.0021, 0, (0.002, 0.003)).call_cost(1)
    costs = [cost(missed, early) for missed, early in zip(ahead.misses, ahead.ahead, strict=True)]
    assert sum(c.seconds for c in costs) / 4 == pytest.approx(result.seconds)
    assert sum(c.stalled for c in costs) / 4 == pytest.approx(result.demand + result.ahead)
    disk = Profile.of_disk(2, 2_000_000, token_seconds=0.01, latency=0)
    assert disk.reading(4) == pytest.approx(0.004)


def test_a_profile_or_forecast_that_cannot_be(tmp_path):
    (tmp_path / "p.json").write_text("{}")
    (tmp_path / "bytes").write_bytes(b"\xff" * 5000)
    (tmp_path / "words").write_text(
        '{"token_seconds": "a", "sync_seconds": 0, "host_seconds": 0, "read_seconds": [1]}'
    )
    for name, words in (
        ("p.json", "no 'token_seconds'"),
        ("none", "No such file"),
        ("bytes", "no 'token_seconds'"),
        ("words", "not numbers"),
    ):
        with pytest.raises(InputError, match=words) as raised:
            Profile.open(tmp_path / name)
        assert len(str(raised.value)) < 200 + len(str(tmp_path))
    for times in ((-1, 0, (1,)), (1, 0, ()), (1, float("nan"), (1,))):
        with pytest.raises(InputError, match="times of 0 to"):
            Profile(*times)
    prompt = zipf_trace(num_experts=8, experts_per_token=2, layers=1, tokens=0, prompt=5)
    with pytest.raises(InputError, match="no decode step"):
        forecast(prompt, simulate(prompt, "50%"), Profile(1, 0, (1,)))


def plain_lru(keys, capacity):
    """CPU seconds of the shortest Python that keeps an LRU: what a look-up costs at least here."""
    start, kept = time.process_time(), OrderedDict()
    for key in keys:
        if key in kept:
            kept.move_to_end(key)
        else:
            if len(kept) == capacity:
                kept.popitem(last=False)
            kept[key] = None
    return time.process_time() - start


@pytest.mark.slow
@pytest.mark.parametrize("budget", ["25%", "12.5%"])
@pytest.mark.parametrize("eviction", [*EVICTIONS, "belady"])
def test_a_lookup_costs_few_plain_ones(eviction, budget):
    """A million look-ups a second on the machine where a plain LRU makes ten: a ratio, because
    the speed of the machine is not the test's subject."""
    trace = zipf_trace(num_experts=256, experts_per_token=8, layers=8, tokens=3000)
    keys = (np.random.default_rng(0).zipf(1.2, 192_000) % 2048).tolist()
    ours, plain = [], []
    for _ in range(7):
        plain.append(plain_lru(keys, 512))
        start = time.process_time()
        total = simulate(trace, budget, eviction=eviction).total
        ours.append(time.process_time() - start)
    assert total.lookups == len(keys)
    assert min(ours) <= 20 * min(plain), min(ours) / min(plain)

"""Oracle: sequences worked by hand, a list in order of last use, sums of powers of two, and the
contract of Eviction as properties."""

import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_moeflux.errors import InputError
from mlx_moeflux.experts.policies.eviction import (
    EVICTIONS,
    LFU,
    LRU,
    ExpertRequest,
    choose_victims,
    make_eviction,
)

EXPERTS = 9


def test_importing_policies_loads_no_mlx():
    code = "import sys, mlx_moeflux.experts.policies.eviction; sys.exit('mlx' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


class Bank:
    """Residents of one layer, kept as a store keeps them."""

    def __init__(self, policy, slots, layer=0):
        self.policy, self.slots, self.layer = policy, slots, layer
        self.resident: set[int] = set()
        self.token = self.hits = 0

    def ask(self, *needed, uses=1):
        """One token asks for `needed`; the victims."""
        needed = sorted(needed)
        at, n = [self.token] * len(needed), [uses] * len(needed)
        self.policy.touch(self.layer, needed, at, n)
        self.token += 1
        missing = [e for e in needed if e not in self.resident]
        self.hits += len(needed) - len(missing)
        victims = self.drop(len(self.resident) + len(missing) - self.slots, needed)
        self.read(missing)
        return victims

    def drop(self, count, protected=()):
        victims = choose_victims(
            self.policy, self.layer, max(0, count), resident=self.resident, protected=protected
        )
        for expert in victims:
            self.resident.remove(expert)
            self.policy.evict(self.layer, expert)
        return victims

    def read(self, experts):
        for expert in experts:
            self.resident.add(expert)
            self.policy.admit(self.layer, expert)
        assert len(self.resident) <= self.slots


def replayed(policy, slots, sequence):
    bank = Bank(policy, slots)
    for expert in sequence:
        bank.ask(expert)
    return bank.hits, bank.resident


BELADYS_ANOMALY = (1, 2, 3, 4, 1, 2, 5, 1, 2, 3, 4, 5)
FREQUENT = (1, 1, 1, 2, 3, 2, 3, 1)


@pytest.mark.parametrize(
    ("policy", "slots", "sequence", "hits", "resident"),
    [
        (LRU(), 3, BELADYS_ANOMALY, 2, {3, 4, 5}),
        (LFU(half_life=1e9), 2, FREQUENT, 3, {1, 3}),
        (LFU(half_life=1), 2, (1, 1, 1, 2, 3, 1), 2, {1, 3}),
        (LFU(half_life=1e9), 2, (1, 1, 1, 2, 3, 1), 3, {1, 3}),
    ],
)
def test_sequences_worked_by_hand(policy, slots, sequence, hits, resident):
    assert replayed(policy, slots, sequence) == (hits, resident)
    policy.reset()
    assert replayed(policy, slots, sequence) == (hits, resident)


def test_lru_evicts_the_longest_unused():
    policy = LRU()
    bank = Bank(policy, 9)
    for expert in (4, 1, 7):
        bank.ask(expert)
    bank.read([3])
    bank.ask(4)
    choose = {"resident": {1, 3, 4, 7}, "protected": ()}
    assert policy.choose(0, 3, **choose) == [3, 1, 7]
    assert policy.choose(0, 2, resident={1, 3, 4, 7}, protected={1}) == [3, 7]
    policy.evict(0, 3)
    policy.admit(0, 5)
    assert policy.choose(0, 1, resident={1, 4, 5, 7}, protected=()) == [5]
    policy.reset()
    assert policy.choose(0, 2, resident={1, 4, 7}, protected={1}) == [4, 7]


@pytest.mark.parametrize("name", EVICTIONS)
def test_layers_do_not_see_each_other(name):
    """Two layers by turns do what each does alone."""
    sequences = [np.random.default_rng(i).integers(0, EXPERTS, 60).tolist() for i in (1, 2)]
    shared = make_eviction(name)
    banks = [Bank(shared, 4, layer) for layer in (0, 6)]
    alone = [Bank(make_eviction(name), 4, layer) for layer in (0, 6)]
    for pair in zip(*sequences, strict=True):
        for bank, one, expert in zip(banks, alone, pair, strict=True):
            assert bank.ask(expert) == one.ask(expert)


@given(uses=st.lists(st.tuples(st.integers(0, 3), st.integers(1, 40)), min_size=1, max_size=40))
def test_lfu_orders_by_the_decayed_sum(uses):
    half_life = 7
    policy, sums = LFU(half_life), dict.fromkeys(range(4), 0.0)
    for at, (expert, n) in enumerate(uses):
        policy.touch(0, [expert], [at], [n])
        sums[expert] += n * 2 ** (at / half_life)
    for expert in range(4):
        policy.admit(0, expert)
    order = policy.choose(0, 4, resident=range(4), protected=())
    for first, then in pairwise(order):
        assert sums[first] <= sums[then] * (1 + 1e-9)


def test_lfu_forgets_nothing_recent_when_its_sums_are_divided():
    """A policy that began late and one that has long been at it choose alike."""
    old, young = Bank(LFU(half_life=2), 4), Bank(LFU(half_life=2), 4)
    for token in range(0, 1200, 3):
        old.ask(token % EXPERTS)
        old.token = token
    old.drop(len(old.resident))
    old.token = young.token = 1198  # the sums are divided soon after 1000 and again after 2000
    for step in range(1000):
        old.token = young.token = 1198 + 2 * step
        expert = step * step % EXPERTS
        first, second = old.ask(expert), young.ask(expert)
        if step > 40:
            assert first == second
    assert old.resident == young.resident


def test_lfu_knows_all_residents_after_its_sums_were_divided():
    bank = Bank(LFU(half_life=1), 4)
    bank.ask(1, uses=50)
    bank.ask(2, uses=40)
    bank.token = 600  # nobody has to leave when this divides the sums
    bank.ask(3)
    bank.ask(4)
    assert bank.ask(5) == [1]  # 50 uses, a token older than 40: 50 against 80
    assert bank.ask(6) == [2]
    assert bank.ask(7) == [3]


@pytest.mark.parametrize("name", EVICTIONS)
def test_more_victims_than_there_are_are_refused(name):
    bank = Bank(make_eviction(name), 4)
    for expert in range(6):
        bank.ask(expert)
    for protected in ((), (3, 5)):
        with pytest.raises(InputError, match="expected 5 different"):
            bank.drop(5, protected)
    bank.ask(7)


def test_lfu_lives_long():
    policy = LFU(half_life=1)
    bank = Bank(policy, 2)
    bank.ask(1, 2, uses=2048)
    bank.token = 10**7
    bank.ask(2, 3)
    assert bank.resident == {2, 3}


class ListLRU:
    """The same in the plainest way."""

    def __init__(self):
        self.order = []

    def touch(self, experts):
        self.order = [e for e in self.order if e not in experts] + list(experts)

    def choose(self, count, resident, protected):
        return [e for e in self.order if e in resident and e not in protected][:count]


calls = st.lists(st.sets(st.integers(0, EXPERTS - 1), min_size=1, max_size=4), max_size=40)


@pytest.mark.parametrize("name", EVICTIONS)
@given(calls=calls, slots=st.integers(4, EXPERTS))
@settings(max_examples=60)
def test_residents_are_neither_lost_nor_doubled(name, calls, slots):
    policy, plain = make_eviction(name), ListLRU()
    bank = Bank(policy, slots)
    for needed in calls:
        before = set(bank.resident)
        victims = bank.ask(*needed)
        plain.touch(sorted(needed))
        assert needed <= bank.resident
        assert bank.resident == before - set(victims) | needed
        assert not needed & set(victims)
        if name == "lru":
            assert victims == plain.choose(len(victims), before, needed)


steps = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.sets(st.integers(0, EXPERTS - 1), min_size=1, max_size=4)),
        st.tuples(st.just("prefetch"), st.integers(0, EXPERTS - 1)),
        st.tuples(st.just("resize"), st.integers(4, EXPERTS)),
        st.tuples(st.just("forget to tell"), st.integers(0, EXPERTS - 1)),
        st.tuples(st.just("choose only"), st.integers(1, 4)),
    ),
    max_size=40,
)


@pytest.mark.parametrize("name", EVICTIONS)
@given(steps=steps)
@settings(max_examples=100)
def test_whatever_happens_the_contract_is_kept(name, steps):
    keeps_the_contract(make_eviction(name), steps)


def keeps_the_contract(policy, steps):
    """Prefetches, resizes, answers that are not followed, changes that nobody tells of."""
    bank = Bank(policy, 5)
    for what, value in steps:
        if what == "ask":
            bank.ask(*value)
            assert value <= bank.resident
        elif what == "prefetch" and value not in bank.resident:
            bank.drop(len(bank.resident) + 1 - bank.slots)
            bank.read([value])
        elif what == "resize":
            bank.drop(len(bank.resident) - value)
            bank.slots = value
        elif what == "forget to tell":
            if value in bank.resident:
                bank.resident.remove(value)
            elif len(bank.resident) < bank.slots:
                bank.resident.add(value)
        elif what == "choose only":
            count = min(value, len(bank.resident))
            choose_victims(bank.policy, 0, count, resident=bank.resident, protected=())


@pytest.mark.parametrize("name", EVICTIONS)
def test_a_long_adversarial_run(name):
    # A policy keeps what is asked for at every token.
    assert hits_of_a_hot_expert(make_eviction(name)) >= 299


def hits_of_a_hot_expert(policy):
    """A loop one longer than the bank, then one hot expert among strangers, then a scan."""
    rng = np.random.default_rng(0)
    bank = Bank(policy, 16)
    for t in range(170):
        bank.ask(t % 17)
    for _ in range(300):
        bank.ask(3, *(20 + rng.choice(80, 3, replace=False)).tolist())
    hot = bank.hits
    for t in range(100):
        bank.ask(100 + t)
    assert len(bank.resident) == 16
    return hot


@pytest.mark.parametrize("answer", [[], [1], [1, 1], [1, 8], [1, 2, 3], [1, 4]])
def test_a_policy_is_held_to_its_contract(answer):
    class Careless(LRU):
        def choose(self, *args, **kwargs):
            return answer

    with pytest.raises(InputError, match="expected 2 different unprotected"):
        choose_victims(Careless(), 3, 2, resident={1, 2, 3, 4}, protected={4})


def test_make_eviction():
    mine = LRU()
    assert make_eviction(mine) is mine
    with pytest.raises(InputError, match="no eviction is called 'mru'; there are lru, lfu"):
        make_eviction("mru")
    with pytest.raises(InputError, match="object has no 'touch'"):
        make_eviction(object())


@given(
    rows=st.lists(st.sets(st.integers(0, EXPERTS), min_size=3, max_size=3), min_size=1, max_size=8)
)
def test_asked_is_what_the_rows_say(rows):
    """The last use of each, found by walking; EXPERTS is padding."""
    ids = np.array([sorted(row) for row in rows], np.uint32)
    last, uses = {}, {}
    for token, row in enumerate(ids.tolist()):
        for rank, expert in enumerate(row):
            if expert < EXPERTS:
                last[expert] = (token, rank)
                uses[expert] = uses.get(expert, 0) + 1
    order = sorted(last, key=last.get)
    request = ExpertRequest.of(ids, EXPERTS, 100)
    assert request.needed == sorted(last)
    assert request.experts == order
    assert request.last == [100 + last[e][0] for e in order]
    assert request.uses == [uses[e] for e in order]

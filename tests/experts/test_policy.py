"""Oracle: a list in order of last use, and the contract of Eviction as properties."""

import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlx_moeflux.errors import InputError
from mlx_moeflux.experts.policy import EVICTIONS, LRU, Clock, choose_victims, make_eviction

EXPERTS = 9


def test_importing_policies_loads_no_mlx():
    code = "import sys, mlx_moeflux.experts.policy; sys.exit('mlx' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def touch(policy, *experts, layer=0):
    for i, expert in enumerate(experts):
        policy.touch(layer, expert, Clock(i, layer, 0), 1)


def test_lru_evicts_the_longest_unused():
    policy = LRU()
    for expert in (4, 1, 7):
        touch(policy, expert)
        policy.admit(0, expert)
    policy.admit(0, 3)
    touch(policy, 4)
    choose = {"resident": {1, 3, 4, 7}, "protected": ()}
    assert policy.choose(0, 3, **choose) == [3, 1, 7]
    assert policy.choose(0, 2, resident={1, 3, 4, 7}, protected={1}) == [3, 7]
    policy.evict(0, 3)
    policy.admit(0, 5)
    assert policy.choose(0, 1, resident={1, 4, 5, 7}, protected=()) == [5]
    policy.reset()
    assert policy.choose(0, 2, resident={1, 4, 7}, protected={1}) == [4, 7]


def test_layers_do_not_see_each_other():
    policy = LRU()
    touch(policy, 1, 2, layer=0)
    touch(policy, 2, 1, layer=6)
    assert policy.choose(0, 1, resident={1, 2}, protected=()) == [1]
    assert policy.choose(6, 1, resident={1, 2}, protected=()) == [2]


class ListLRU:
    """The same in the plainest way."""

    def __init__(self):
        self.order = []

    def touch(self, expert):
        self.order = [e for e in self.order if e != expert] + [expert]

    def choose(self, count, resident, protected):
        return [e for e in self.order if e in resident and e not in protected][:count]


calls = st.lists(st.sets(st.integers(0, EXPERTS - 1), min_size=1, max_size=4), max_size=30)


@pytest.mark.parametrize("name", EVICTIONS)
@given(calls=calls, slots=st.integers(4, EXPERTS))
@settings(max_examples=60, deadline=None)
def test_residents_are_neither_lost_nor_doubled(name, calls, slots):
    policy, plain = make_eviction(name), ListLRU()
    resident: set[int] = set()
    for token, needed in enumerate(calls):
        for order, expert in enumerate(sorted(needed)):
            policy.touch(0, expert, Clock(token, 0, order), 1)
            plain.touch(expert)
        missing = sorted(needed - resident)
        short = max(0, len(resident) + len(missing) - slots)
        victims = choose_victims(policy, 0, short, resident=resident, protected=needed)
        assert len(victims) == len(set(victims)) == short
        assert set(victims) <= resident - needed
        if name == "lru":
            assert victims == plain.choose(short, resident, needed)
        for expert in victims:
            policy.evict(0, expert)
        for expert in missing:
            policy.admit(0, expert)
        resident = resident - set(victims) | needed
        assert len(resident) <= slots


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
    with pytest.raises(InputError, match="no eviction is called 'mru'; there are lru"):
        make_eviction("mru")
    with pytest.raises(InputError, match="object has no method 'touch'"):
        make_eviction(object())

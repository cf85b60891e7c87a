"""Oracle: the resident store, bit for bit; the replay, count by count; rules worked by hand."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.errors import InputError
from mlx_moeflux.experts.policies.rebalance import Shift, changes_in_order, make_balance
from mlx_moeflux.experts.telemetry.simulate import simulate
from mlx_moeflux.experts.telemetry.trace import Trace
from mlx_moeflux.loading import BUNDLED_MODEL, load_model
from tests.experts.telemetry.test_simulate import COUNTED

LIMITS = {"least": 2, "most": 9, "bytes_of": {3: 10, 5: 10, 9: 10}}


def test_slots_go_where_victims_are_wanted_back():
    shift = Shift(period=10, step=2, margin=1.5)
    slots = {3: 4, 5: 4, 9: 4}
    shift.called(3, [], [1, 2, 3])  # 1 is forgotten: with two slots more it would have gone too
    shift.called(3, [1, 2, 3], [])
    shift.called(5, [7], [4])
    shift.called(5, [4], [])
    assert changes_in_order(shift, 9, slots, **LIMITS) == []
    assert changes_in_order(shift, 10, slots, **LIMITS) == [(9, 2), (3, 6)]
    # The next decision is a period later, on new counts.
    assert changes_in_order(shift, 19, {3: 6, 5: 4, 9: 2}, **LIMITS) == []
    assert changes_in_order(shift, 20, {3: 6, 5: 4, 9: 2}, **LIMITS) == []


def test_nobody_gives_what_others_need_as_much():
    shift = Shift(period=1, step=1, margin=2)
    for layer, times in ((3, 3), (5, 2), (9, 2)):
        for _ in range(times):
            shift.called(layer, [], [1])
            shift.called(layer, [1], [])
    assert changes_in_order(shift, 1, {3: 4, 5: 4, 9: 4}, **LIMITS) == []
    shift.reset()
    shift.called(3, [], [1])
    shift.called(3, [1], [])
    full = {3: 9, 5: 2, 9: 2}
    assert changes_in_order(shift, 1, full, **LIMITS) == []


@pytest.mark.parametrize("answer", [{3: 5, 5: 4}, {3: 5, 5: 4, 9: 4}, {3: 1, 5: 4, 9: 4}])
def test_a_balance_is_held_to_its_contract(answer):
    class Careless(Shift):
        def share(self, *arguments, **options):
            return answer

    with pytest.raises(InputError, match="shift gave slots"):
        changes_in_order(Careless(), 1, {3: 4, 5: 4, 9: 4}, **LIMITS)


def test_names_and_objects():
    mine = Shift()
    assert make_balance(mine) is mine
    assert make_balance("none") is make_balance(None) is None
    with pytest.raises(InputError, match="no balance is called 'fair'; there are none, shift"):
        make_balance("fair")
    with pytest.raises(InputError, match="object has no 'called'"):
        make_balance(object())


class Greedy(Shift):
    """Takes a slot from the last layer, and gives it to the first, whenever that is possible."""

    def share(self, token, slots, *, least, most):
        first, last = min(slots), max(slots)
        if token % 3 or slots[last] - 1 < least or slots[first] + 1 > most:
            return slots
        return {**slots, first: slots[first] + 1, last: slots[last] - 1}


@pytest.mark.parametrize("listener", [None, lambda event: None])
def test_slots_move_the_same_whether_or_not_somebody_listens(listener):
    """The last layer begins complete: nobody looks into it."""
    options = {"expert_memory": "97%", "balance": Greedy(), "events": listener}
    with load_model(BUNDLED_MODEL) as resident, load_model(BUNDLED_MODEL, **options) as model:
        model.store.resize(5, 32)
        model.store.resize(0, 20)
        model.store.preload()
        a, b = resident.make_cache(), model.make_cache()
        for t in range(20):
            tokens = mx.array([[7 * t % 4096]])
            assert mx.array_equal(resident(tokens, a), model(tokens, b))
        assert (model.store.slots[0], model.store.slots[5]) == (26, 26)


@pytest.mark.parametrize("prefetch", [pytest.param("none", marks=pytest.mark.slow), "ahead"])
@pytest.mark.parametrize("eviction", ["lfu", "s3fifo"])
def test_live_is_simulated_and_exact_while_slots_move(tmp_path, eviction, prefetch):
    random = np.random.default_rng(3)
    options = {"eviction": eviction, "prefetch": prefetch}
    with (
        load_model(BUNDLED_MODEL) as resident,
        load_model(
            BUNDLED_MODEL,
            expert_memory="30%",
            keep_all_ahead=True,
            balance=Shift(4, 1, 1.0),
            **options,
        ) as model,
    ):
        a, b = resident.make_cache(), model.make_cache()
        before, held = dict(model.store.slots), model.store.bank_bytes
        with model.trace(tmp_path / "x"):
            for T in (9, *[1] * 14, 4, *[1] * 10):
                tokens = mx.array(random.integers(0, 4096, (1, T)))
                assert mx.array_equal(resident(tokens, a), model(tokens, b))
        assert model.store.slots != before
        assert model.store.bank_bytes == held
        live, slots = model.store.stats().snapshot(), dict(model.store.slots)
    trace = Trace.open(tmp_path / "x")
    assert trace.info.slots == before
    balance = Shift(4, 1, 1.0)
    replayed = simulate(trace, before, balance=balance, **options)
    for layer, counts in replayed.layers.items():
        for name in COUNTED:
            assert getattr(counts, name) == getattr(live.layers[layer], name), (layer, name)
    assert sum(slots.values()) == sum(before.values())

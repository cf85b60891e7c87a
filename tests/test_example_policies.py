"""Oracle: sequences worked by hand, the contract of Eviction, and the replay of a live run."""

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings

from examples.policies.balance import Balance
from examples.policies.chance import Random
from examples.policies.clock import CLOCK
from examples.policies.s3fifo import S3FIFO
from examples.policies.static import Static
from mlx_moeflux.experts.policies.eviction import make_eviction
from mlx_moeflux.experts.telemetry.events import Evict, Miss
from mlx_moeflux.experts.telemetry.simulate import simulate
from mlx_moeflux.experts.telemetry.trace import Trace
from mlx_moeflux.loading import load_model
from tests.experts.policies.test_eviction import (
    BELADYS_ANOMALY,
    EXPERTS,
    Bank,
    hits_of_a_hot_expert,
    keeps_the_contract,
    replayed,
    steps,
)
from tests.experts.telemetry.test_simulate import same_counts

KINDS = [CLOCK, S3FIFO, Static, Random]
THREE_QUEUES = (1, 2, 3, 4, 1, 1, 5, 2, 4, 6, 7, 3, 8, 1, 4, 4, 4, 9)


@pytest.mark.parametrize(
    ("policy", "slots", "sequence", "hits", "resident"),
    [
        (CLOCK(), 3, BELADYS_ANOMALY, 3, {3, 4, 5}),
        (S3FIFO(), 4, THREE_QUEUES, 6, {1, 3, 4, 9}),
        (Static({0: {1: 5, 2: 3, 3: 1}}), 2, (3, 2, 1, 3, 2, 1), 1, {1, 2}),
        (Static(learn=2), 2, (1, 1, 2, 2, 2, 3, 2, 1), 4, {1, 2}),
        (Static(), 2, (1, 1, 2, 2, 2, 3, 2, 1), 4, {1, 2}),
    ],
)
def test_sequences_worked_by_hand(policy, slots, sequence, hits, resident):
    assert replayed(policy, slots, sequence) == (hits, resident)
    policy.reset()
    assert replayed(policy, slots, sequence) == (hits, resident)


def test_random_is_random_and_repeatable():
    def victims(seed):
        bank = Bank(Random(seed), 4)
        return [tuple(bank.ask(e % EXPERTS)) for e in range(100)]

    assert victims(0) == victims(0) != victims(1)
    counts = np.bincount([v[0] for v in victims(0) if v], minlength=EXPERTS)
    assert counts.min() > 0


@pytest.mark.parametrize("kind", KINDS)
@given(steps=steps)
@settings(max_examples=60)
def test_whatever_happens_the_contract_is_kept(kind, steps):
    keeps_the_contract(make_eviction(kind()), steps)


@pytest.mark.parametrize("kind", KINDS)
def test_a_hot_expert_stays(kind):
    assert hits_of_a_hot_expert(kind()) >= 299 or kind is Random


@pytest.mark.parametrize("kind", KINDS)
def test_a_replay_gives_the_live_hits(two_bundled_layers, tmp_path, kind):
    random = np.random.default_rng(3)
    with load_model(two_bundled_layers, expert_memory="20%", eviction=kind()) as model:
        with model.trace(tmp_path / "x"):
            cache = model.make_cache()
            for T in (9, *[1] * 5, 4, *[1] * 3):
                mx.eval(model(mx.array(random.integers(0, 4096, (1, T))), cache))
        live = model.store.stats().snapshot()
    replay = simulate(Trace.open(tmp_path / "x"), "20%", eviction=kind())
    assert replay.total.evictions > 0
    assert same_counts(live, replay)


class Slots:
    """What a balance reads and changes of a streamed store."""

    most_slots = 9

    def __init__(self, slots):
        self.slots, self.moves = slots, []

    def resize(self, layer, count):
        self.moves.append((layer, count))
        self.slots = {**self.slots, layer: count}


def call(balance, layer, misses, victims):
    for expert in misses:
        balance(Miss(layer, expert))
    for expert in victims:
        balance(Evict(layer, expert, 0))


def test_slots_go_where_victims_are_wanted_back():
    balance, store = Balance(step=2, margin=1.5), Slots({3: 4, 5: 4, 9: 4})
    call(balance, 3, [], [1, 2, 3])  # 1 is forgotten: with two slots more it would have gone too
    call(balance, 3, [1, 2, 3], [])
    call(balance, 5, [7], [4])
    call(balance, 5, [4], [])
    balance.move(store, least=2)
    assert store.moves == [(9, 2), (3, 6)]
    balance.move(store, least=2)  # on new counts
    assert len(store.moves) == 2


def test_no_layer_gives_what_others_need_as_much():
    balance, store = Balance(step=1, margin=2), Slots({3: 4, 5: 4, 9: 4})
    for layer, times in ((3, 3), (5, 2), (9, 2)):
        for _ in range(times):
            call(balance, layer, [], [1])
            call(balance, layer, [1], [])
    balance.move(store, least=2)
    call(balance, 3, [], [1])
    call(balance, 3, [1], [])
    store.slots = {3: 9, 5: 2, 9: 2}  # the first is complete, the others have no slot to give
    balance.move(store, least=2)
    assert store.moves == []


@pytest.mark.slow
def test_slots_move_between_tokens_without_changing_a_bit(two_bundled_layers):
    balance = Balance()
    with (
        load_model(two_bundled_layers) as resident,
        load_model(two_bundled_layers, expert_memory="30%", events=balance) as model,
    ):
        a, b = resident.make_cache(), model.make_cache()
        before, held = model.store.slots, model.store.bank_bytes
        random = np.random.default_rng(3)
        for T in (9, *[1] * 14, 4, *[1] * 10):
            tokens = mx.array(random.integers(0, 4096, (1, T)))
            assert mx.array_equal(resident(tokens, a), model(tokens, b))
            balance.move(model.store.streaming, model.router.num_experts_per_tok)
        assert model.store.slots != before
        assert model.store.bank_bytes == held

"""What a streamed store tells its listeners and its policy, in which order."""

import mlx.core as mx
import pytest

from mlx_moeflux.experts.policies.eviction import LRU
from mlx_moeflux.experts.telemetry.events import Chosen, Evict, Hit, Miss, ReadEnd, ReadStart
from tests.experts.helpers import C, E, random_call


def test_events_in_their_order(open_store):
    events = []
    store = open_store(4, events=events.append)

    def ask(*rows):
        del events[:]
        ids = mx.array(rows, mx.uint32)
        store.experts(3, mx.ones((len(rows), C)), ids, mx.full(ids.shape, 0.5))
        chosen = events[0]
        assert isinstance(chosen, Chosen)
        assert chosen.ids.tolist() == [list(row) for row in rows]
        assert (chosen.weights == 0.5).all()
        return chosen.token, [(type(e), e.expert) for e in events[1:]]

    def some(kind, *experts):
        return [(kind, e) for e in experts]

    reads = some(ReadStart, 1, 5) + some(ReadEnd, 1, 5)
    assert ask([1, 5]) == (0, some(Miss, 1, 5) + reads)
    found = some(Miss, 0) + some(Hit, 5) + some(ReadStart, 0) + some(ReadEnd, 0)
    assert ask([0, 5]) == (1, found)
    assert ask([1, E]) == (2, some(Hit, 1))
    found = some(Hit, 1) + some(Miss, 2, 6)
    found += some(Evict, 0) + some(ReadStart, 2, 6) + some(ReadEnd, 2, 6)
    assert ask([1, 2], [2, 6]) == (3, found)
    token, found = ask([0, 1, 2], [3, 4, 6])
    assert token == 5
    assert [e for kind, e in found if kind in (Hit, Miss)] == [0, 1, 2, 3, 4, 6]
    started = [e for kind, e in found if kind is ReadStart]
    assert started == sorted(started) == [e for kind, e in found if kind is Miss]
    assert started == [e for kind, e in found if kind is ReadEnd]


def test_read_events_carry_slot_bytes_and_seconds(open_store, experts):
    events = []
    store = open_store(E, events=events.append)
    store.experts(3, *random_call(1))
    ends = [e for e in events if isinstance(e, ReadEnd)]
    assert {e.expert: e.slot for e in ends} == store.residents(3)
    assert all(e.nbytes == experts.layouts[3].nbytes and e.seconds > 0 for e in ends)
    stats = store.stats().layers[3]
    assert stats.read_seconds == pytest.approx(sum(e.seconds for e in ends))
    assert stats.stall_seconds > 0
    assert stats.compute_seconds > 0


def test_the_policy_sees_the_last_use_in_order(open_store):
    class Listening(LRU):
        seen = ()

        def touch(self, layer, experts, last, uses):
            self.seen = (*self.seen, (layer, experts, last, uses))
            super().touch(layer, experts, last, uses)

    policy = Listening()
    store = open_store(E, eviction=policy)
    ids = mx.array([[1, 4], [0, 4], [1, E]], mx.uint32)
    for _ in range(2):
        store.experts(5, mx.ones((3, C)), ids, mx.ones((3, 2)))
    one = mx.array([[2, E]], mx.uint32)
    store.experts(5, mx.ones((1, C)), one, mx.ones((1, 2)))
    assert policy.seen == (
        (5, [0, 4, 1], [1, 1, 2], [1, 2, 2]),
        (5, [0, 4, 1], [4, 4, 5], [1, 2, 2]),
        (5, [2], [6], [1]),
    )

"""Oracle: the store's own totals, and events made by hand."""

import json

import numpy as np
import pytest

from mlx_moeflux import generate, load
from mlx_moeflux.errors import InputError
from mlx_moeflux.experts.store import ExpertStore
from mlx_moeflux.experts.telemetry.attribution import Attribution, CallCost
from mlx_moeflux.experts.telemetry.events import Chosen, Evict, Hit, Miss, PrefetchEnd, ReadEnd
from mlx_moeflux.experts.telemetry.stats import ExpertStats


def test_events_by_hand():
    stats = ExpertStats((3, 5))
    stats.calls = []
    listen = Attribution(stats)
    ids = np.array([[0, 4, 9], [0, 2, 4]], np.uint32)
    listen(Hit(3, 1))  # the tail of a call that began before
    listen(Chosen(3, 7, ids, np.ones((2, 3))))
    listen(PrefetchEnd(3, 2, 0, 50, 0.1))
    for event in (Hit(3, 0), Hit(3, 2, prefetched=True), Miss(3, 4), Evict(3, 8, 1)):
        listen(event)
    listen(ReadEnd(3, 4, 1, 100, 0.2))
    stats.layers[3].stall_seconds += 0.25
    listen(Evict(5, 1, 1))
    listen(Chosen(5, 7, ids[:1], np.ones((1, 3))))
    listen.end_of_call()
    first, second = stats.calls
    assert (first.layer, first.token) == (3, 7)
    assert (first.hits, first.prefetched, first.missed) == ([0], [2], [4])
    assert (first.bytes_demanded, first.bytes_hidden, first.stall_seconds) == (100, 50, 0.25)
    assert second.stall_seconds == 0
    assert (second.layer, second.token) == (5, 7)
    assert json.loads(json.dumps(stats.as_dict()))["calls"][0]["ids"] == ids.tolist()


@pytest.mark.parametrize("prefetch", ["none", "ahead"])
def test_calls_add_up_to_the_totals(two_bundled_layers, prefetch):
    model, tokenizer = load(two_bundled_layers, expert_memory="25%", prefetch=prefetch)
    with model:
        with model.attribute():
            generate(model, tokenizer, "import ", max_tokens=3)
            last = generate(model, tokenizer, "def f(", max_tokens=5, return_response=True)
        after = generate(model, tokenizer, "def f(", max_tokens=2, return_response=True)
        assert after.experts.calls is None
        assert model.store.events is None
    calls, total = last.experts.calls, last.experts.total
    assert all(isinstance(call, CallCost) for call in calls)
    assert sum(len(c.hits) + len(c.prefetched) for c in calls) == total.hits
    assert sum(len(c.prefetched) for c in calls) == total.prefetched_hits
    assert sum(len(c.missed) for c in calls) == total.misses
    assert sum(c.bytes_demanded + c.bytes_hidden for c in calls) == total.bytes_read
    assert sum(c.stall_seconds for c in calls) == pytest.approx(total.stall_seconds, rel=0.01)
    assert sum(len(c.ids) for c in calls if c.layer == 0) == total.tokens
    steps = {call.token: [c.layer for c in calls if c.token == call.token] for call in calls}
    assert all(layers == list(range(2)) for layers in steps.values())


def test_a_resident_model_tells_what_was_chosen(two_bundled_layers):
    model, tokenizer = load(two_bundled_layers)
    with model, model.attribute():
        last = generate(model, tokenizer, "def f(", max_tokens=3, return_response=True)
    assert len(last.experts.calls) % 2 == 0
    assert not any(call.missed for call in last.experts.calls)


def test_a_store_without_events_is_refused(two_bundled_layers):
    class Silent(ExpertStore):
        experts = close = len

        def stats(self):
            return ExpertStats(())

    model, _ = load(two_bundled_layers)
    store = model.store
    model.set_store(Silent())
    with pytest.raises(InputError, match="Silent has no events"), model.attribute():
        pass
    store.close()

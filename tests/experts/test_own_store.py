"""Oracle: a store of one's own that defines only `experts` is asked for every token."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.errors import InputError
from mlx_moeflux.experts.resident import ResidentStore
from mlx_moeflux.experts.store import ExpertStore
from mlx_moeflux.experts.streaming.store import StreamedStore
from mlx_moeflux.experts.telemetry.events import Chosen
from mlx_moeflux.experts.telemetry.stats import ExpertStats
from mlx_moeflux.loading import load_model

PROMPT, STEPS, BATCH = 9, 3, 2


class Counting:
    """Mixed into a store: counts the tokens of each layer."""

    def experts(self, layer, x, ids, weights, **options):
        self.asked[layer] = self.asked.get(layer, 0) + x.shape[0]
        return super().experts(layer, x, ids, weights, **options)


class OwnStreamed(StreamedStore):
    def experts(self, layer, x, ids, weights, **options):
        self.asked[layer] = self.asked.get(layer, 0) + x.shape[0]
        return super().experts(layer, x, ids, weights, **options)


class OwnResident(ResidentStore):
    def experts(self, layer, x, ids, weights):
        self.asked[layer] = self.asked.get(layer, 0) + x.shape[0]
        return super().experts(layer, x, ids, weights)


class MixedIn(Counting, StreamedStore):
    pass


class Bare(ExpertStore):
    def __init__(self, inner):
        self.inner, self.layers, self.num_experts = inner, inner.layers, inner.num_experts
        self._stats = ExpertStats(self.layers)

    def experts(self, layer, x, ids, weights):
        self.asked[layer] = self.asked.get(layer, 0) + x.shape[0]
        self._stats.layers[layer].tokens += x.shape[0]
        return self.inner.experts(layer, x, ids, weights)

    def stats(self):
        return self._stats

    def close(self): ...


def run(model, tokens, *, traced):
    """A prompt and some steps of one sequence, then of two."""
    model.compile_steps, outputs = traced, []
    for rows in (tokens[:1], tokens):
        cache = model.make_cache()
        outputs.append(model(rows[:, :PROMPT], cache))
        for i in range(PROMPT, PROMPT + STEPS):
            outputs.append(model(rows[:, i : i + 1], cache))
            mx.eval(outputs[-1])
            model.runtime.start_eval()
    return outputs


# Kind and memory, and whether steps that are traced, or not, are checked by default.
KINDS = {
    (OwnStreamed, "40%"): True,
    (OwnStreamed, "all slots"): None,
    (MixedIn, "40%"): None,
    (OwnResident, "auto"): True,
    (Bare, "auto"): False,
    (Bare, "40%"): None,
}


@pytest.mark.parametrize(
    ("kind", "memory", "traced"),
    [
        pytest.param(*kind, traced, marks=[pytest.mark.slow] * (KINDS[kind] != traced))
        for traced in (False, True)
        for kind in KINDS
    ],
)
def test_every_token_goes_through_experts(two_bundled_layers, kind, memory, traced):
    options = {"dtype": mx.float32, "kernels": "reference"}
    tokens = mx.array(np.random.default_rng(4).integers(0, 4096, (BATCH, PROMPT + STEPS)))
    budget = "40%" if memory == "all slots" else memory
    with load_model(two_bundled_layers, expert_memory=budget, **options) as model:
        expected = run(model, tokens, traced=False)
        store = model.store
        if kind is Bare:
            store = Bare(store)
        else:
            if memory == "all slots":
                store.resize_all(dict.fromkeys(store.layers, store.num_experts))
                store.preload()
                assert store.direct.stays_on_device
            store.__class__ = kind
        assert store.direct is store.steps is None
        store.asked = {}
        store.stats().reset()
        model.set_store(store)
        found = run(model, tokens, traced=traced)
        every = dict.fromkeys(store.layers, (1 + BATCH) * (PROMPT + STEPS))
        assert store.asked == every
        assert {i: stats.tokens for i, stats in store.stats().layers.items()} == every
        assert all(mx.array_equal(a, b).item() for a, b in zip(found, expected, strict=True))
        if kind is Bare:
            with pytest.raises(InputError, match="Bare has no events"):
                store.events = print
            return
        told = []
        store.events = lambda event: told.append(event) if isinstance(event, Chosen) else None
        store.asked.clear()
        run(model, tokens, traced=traced)
        assert store.asked == every
        assert len(told) == 2 * (1 + STEPS) * len(store.layers)


def test_a_class_without_experts_of_its_own_keeps_the_ways_past_them(two_bundled_layers):
    class Idle(StreamedStore):
        pass

    class Still(ResidentStore):
        pass

    class Open(OwnResident):
        """Says itself that its banks may stand for its experts."""

        @property
        def direct(self):
            return self

    for base, memory, kinds in (
        (StreamedStore, "40%", (Idle,)),
        (ResidentStore, "auto", (Still, Open)),
    ):
        with load_model(two_bundled_layers, expert_memory=memory) as model:
            store = model.store
            assert type(store) is base
            for kind in (base, *kinds):
                store.__class__ = kind
                assert store.direct is store
                assert store.steps is (store if base is StreamedStore else None)
                assert store.streaming is store.steps
                assert store.rest is store
                assert store.ranks is None
            store.__class__ = base

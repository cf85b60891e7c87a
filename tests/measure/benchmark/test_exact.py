"""Oracle: the resident store's bits, and differences worked out by hand."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.checkpoint.source import open_checkpoint
from mlx_moeflux.errors import ExactnessError
from mlx_moeflux.experts.io.readers import make_reader
from mlx_moeflux.kernels.registry import Kernels
from mlx_moeflux.loading import load_model
from mlx_moeflux.measure.benchmark.exact import (
    FreshStore,
    difference,
    forced_logits,
    hold,
)
from mlx_moeflux.models import map_checkpoint


def test_fresh_experts_give_the_resident_bits(checkpoint):
    mapped = map_checkpoint(open_checkpoint(checkpoint))
    store = FreshStore(make_reader("auto", mapped.experts), mix=Kernels().expert_mix)
    ids = mx.array(np.random.default_rng(0).integers(0, 1000, (2, 19)))
    with load_model(checkpoint, store=store) as fresh:
        found = np.array(fresh(ids))
    with load_model(checkpoint, expert_memory="100%") as resident:
        expected = np.array(resident(ids))
    assert np.isfinite(found).all()
    np.testing.assert_array_equal(found, expected)


def test_padding_asks_fresh_experts_for_nothing(checkpoint):
    mapped = map_checkpoint(open_checkpoint(checkpoint))
    store = FreshStore(make_reader("auto", mapped.experts))
    x = mx.random.normal((2, 128))
    ids = mx.full((2, 4), store.num_experts, mx.uint32)
    y = store.experts(0, x, ids, mx.zeros((2, 4)))
    assert mx.all(y == 0)
    store.close()


def test_difference_by_hand():
    expected = np.array([[[3.0, 4.0], [1.0, 1.0], [2.0, 0.0]]], np.float32)
    found = expected + np.array([[[0.0, 0.0], [0.1, -0.1], [0.0, 0.2]]], np.float32)
    apart = difference(found, expected)
    assert not apart.same
    assert apart.worst == pytest.approx(0.1, rel=1e-5)
    assert apart.median == pytest.approx(0.1, rel=1e-5)
    assert apart.largest == pytest.approx(0.2, rel=1e-5)
    assert difference(expected, expected).same


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_never_passes(bad):
    expected = np.ones((1, 3, 5), np.float32)
    found = expected.copy()
    found[0, 1, 2] = bad
    for pair in ((found, expected), (expected, found), (found, found)):
        with pytest.raises(ExactnessError, match="no speed is printed"):
            hold("this", difference(*pair), 1e9)


def test_shapes_must_agree():
    with pytest.raises(ExactnessError, match="shape"):
        difference(np.ones((1, 2, 3)), np.ones((1, 1, 3)))


def test_the_worst_position_counts():
    expected = np.random.default_rng(0).standard_normal((1, 9, 50)).astype(np.float32)
    close = expected * (1 + 0.9e-4)
    assert "tolerance 0.0001" in hold("this", difference(close, expected), 1e-4)
    close[0, 4] *= 1.001
    with pytest.raises(ExactnessError, match=r"this: .* more than 0\.0001; no speed"):
        hold("this", difference(close, expected), 1e-4)


def test_forced_logits_come_in_order():
    calls = []

    def call(part):
        calls.append(part.tolist())
        return mx.repeat(part[..., None].astype(mx.float32), 3, axis=-1)

    ids = np.arange(14).reshape(2, 7)
    logits = forced_logits(call, ids, decode=3)
    assert [len(part[0]) for part in calls] == [4, 1, 1, 1]
    np.testing.assert_array_equal(logits, np.repeat(ids[..., None], 3, axis=-1))

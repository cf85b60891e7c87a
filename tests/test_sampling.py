"""Oracles: numpy, one row at a time, and mlx-lm's own functions."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm import sample_utils

from mlx_moeflux import sampling
from mlx_moeflux.errors import InputError

B, V = 3, 41


@pytest.fixture
def logprobs():
    logits = np.random.default_rng(0).standard_normal((B, V)).astype(np.float32) * 3
    return mx.array(logits - np.log(np.exp(logits).sum(-1, keepdims=True)))


def kept(array: mx.array) -> list[set[int]]:
    return [set(np.flatnonzero(np.isfinite(row)).tolist()) for row in np.array(array)]


@pytest.mark.parametrize("top_p", [0.1, 0.5, 0.9, 0.999])
def test_top_p(logprobs, top_p):
    rows = []
    for row in np.exp(np.array(logprobs, dtype=np.float64)):
        order, total, keep = np.argsort(-row), 0.0, set()
        for i in order:
            if total >= top_p:
                break
            keep.add(int(i))
            total += row[i]
        rows.append(keep)
    assert kept(sampling.keep_top_p(logprobs, top_p)) == rows
    assert kept(sample_utils.apply_top_p(logprobs, top_p)) == rows


@pytest.mark.parametrize("min_p", [0.01, 0.2, 0.9])
@pytest.mark.parametrize("least", [1, 5])
def test_min_p(logprobs, min_p, least):
    rows = []
    for row in np.exp(np.array(logprobs)):
        best = set(np.argsort(-row)[:least].tolist())
        rows.append(best | set(np.flatnonzero(row >= min_p * row.max()).tolist()))
    assert kept(sampling.keep_min_p(logprobs, min_p, least)) == rows


@pytest.mark.parametrize("k", [1, 7, V, 100])
def test_top_k(logprobs, k):
    rows = [set(np.argsort(-row)[:k].tolist()) for row in np.array(logprobs)]
    assert kept(sampling.keep_top_k(logprobs, k)) == rows


def test_xtc_drops_all_but_the_least_of_the_likely(logprobs):
    dropped = sampling.exclude_top_choices(logprobs + 0, probability=1.0, threshold=0.05)
    for row, keep in zip(np.exp(np.array(logprobs)), kept(dropped), strict=True):
        above = np.flatnonzero(row > 0.05)
        weakest = above[np.argmin(row[above])] if len(above) else None
        assert keep == set(range(V)) - set(above.tolist()) | ({int(weakest)} - {None})
    same = sampling.exclude_top_choices(logprobs + 0, probability=0.0, threshold=0.05)
    assert mx.array_equal(same, logprobs)
    best = int(np.argmax(np.array(logprobs)[0]))
    special = sampling.exclude_top_choices(
        logprobs + 0, probability=1.0, threshold=0.05, special=[best]
    )
    assert best in kept(special)[0]


def test_greedy_and_frequencies(logprobs):
    greedy = sampling.make_sampler()
    assert greedy(logprobs).tolist() == np.argmax(np.array(logprobs), -1).tolist()
    mx.random.seed(5)
    many = mx.repeat(logprobs[:1], 20000, axis=0)
    drawn = np.array(sampling.make_sampler(temp=2.0)(many))
    expected = np.exp(np.array(logprobs[0]) / 2)
    expected /= expected.sum()
    found = np.bincount(drawn, minlength=V) / len(drawn)
    assert np.abs(found - expected).max() <= 0.015
    narrow = np.array(sampling.make_sampler(temp=1.0, top_k=2)(many))
    assert set(narrow.tolist()) == set(np.argsort(-np.array(logprobs[0]))[:2].tolist())


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 1.3, "repetition_context_size": 4},
        {"presence_penalty": 0.7, "presence_context_size": 5},
        {"frequency_penalty": 0.4, "frequency_context_size": 6},
        {"logit_bias": {3: 2.0, 40: -5.0}},
    ],
)
def test_penalties_are_mlx_lms_and_numpys(options):
    logits = np.random.default_rng(1).standard_normal((1, V)).astype(np.float32) * 2
    tokens = [1, 5, 5, 9, 5, 3, 1]
    expected = logits[0].copy()
    for i, bias in options.get("logit_bias", {}).items():
        expected[i] += bias
    if "repetition_penalty" in options:
        for i in set(tokens[-4:]):
            expected[i] = expected[i] * 1.3 if expected[i] < 0 else expected[i] / 1.3
    if "presence_penalty" in options:
        for i in set(tokens[-5:]):
            expected[i] -= 0.7
    if "frequency_penalty" in options:
        for i in tokens[-6:]:
            expected[i] -= 0.4
    for make in (sampling.make_logits_processors, sample_utils.make_logits_processors):
        (processor,) = make(**options)
        found = np.array(processor(mx.array(tokens), mx.array(logits)))[0]
        assert np.abs(found - expected).max() <= 1e-5, make.__module__


@pytest.mark.parametrize(
    "options",
    [
        {"temp": -0.1},
        {"top_p": 1.1},
        {"min_p": -1},
        {"top_k": -1},
        {"min_tokens_to_keep": 0},
        {"xtc_probability": 2},
        {"xtc_threshold": 0.6},
    ],
)
def test_values_out_of_range(options):
    with pytest.raises(InputError, match=next(iter(options))):
        sampling.make_sampler(**{"temp": 1.0, **options})
    with pytest.raises(InputError, match="repetition_penalty"):
        sampling.make_logits_processors(repetition_penalty=-1)

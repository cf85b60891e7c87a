"""Oracles: numpy, one row at a time, and mlx-lm's own functions."""

from __future__ import annotations

from inspect import signature

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm import sample_utils

from mlx_moeflux.errors import InputError
from mlx_moeflux.generation import sampling

B, V = 3, 41


@pytest.fixture
def logprobs():
    logits = np.random.default_rng(0).standard_normal((B, V)).astype(np.float32) * 3
    return mx.array(logits - np.log(np.exp(logits).sum(-1, keepdims=True)))


def kept(array: mx.array) -> list[set[int]]:
    rows = np.array(array.astype(mx.float32))
    return [set(np.flatnonzero(np.isfinite(row)).tolist()) for row in rows]


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


@pytest.mark.parametrize("threshold", [0.05, 0.2, 0.45])
@pytest.mark.parametrize("first", [{"top_p": 0.6}, {"min_p": 0.3}])
def test_xtc_counts_what_earlier_filters_left(logprobs, first, threshold):
    if "top_p" in first:
        left = sampling.keep_top_p(logprobs, **first)
    else:
        left = sampling.keep_min_p(logprobs, **first)
    ours = sampling.exclude_top_choices(left, probability=1.0, threshold=threshold)
    theirs = sample_utils.apply_xtc(left, 1.0, threshold, [])
    assert kept(ours) == kept(theirs)
    p = np.where(np.isfinite(np.array(left)), np.exp(np.array(left, dtype=np.float64)), 0)
    for row, keep in zip(p / p.sum(-1, keepdims=True), kept(ours), strict=True):
        above = np.flatnonzero(row > threshold)
        dropped = set(above.tolist()) - (
            {int(above[np.argmin(row[above])])} if len(above) else set()
        )
        assert keep == set(np.flatnonzero(row).tolist()) - dropped


@pytest.mark.parametrize("top_p", [0.5, 0.9])
def test_top_p_counts_in_float32(top_p):
    logits = mx.array(np.random.default_rng(2).standard_normal((1, 4096))).astype(mx.bfloat16)
    narrow = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
    found = sampling.keep_top_p(narrow, top_p)
    assert found.dtype == mx.bfloat16
    p = np.sort(np.exp(np.array(narrow.astype(mx.float32), dtype=np.float64)[0]))[::-1]
    expected = int(np.searchsorted(np.cumsum(p / p.sum()), top_p)) + 1
    assert abs(len(kept(found)[0]) - expected) <= 2


def test_defaults_are_mlx_lms():
    ours = {n: p.default for n, p in signature(sampling.make_sampler).parameters.items()}
    assert ours.pop("seed") is None  # mlx-lm has none
    theirs = {n: p.default for n, p in signature(sample_utils.make_sampler).parameters.items()}
    # 0 and 1 both mean no top-p.
    assert list(ours) == list(theirs)
    assert ours | {"top_p": 0.0} == theirs
    ours = {n: p.default for n, p in signature(sampling.make_logits_processors).parameters.items()}
    theirs = signature(sample_utils.make_logits_processors).parameters.items()
    assert ours == {n: p.default for n, p in theirs}


def test_arguments_stay_as_they_are(logprobs):
    before, tokens = np.array(logprobs), mx.array([3, 5, 3, 40])
    processors = sampling.make_logits_processors({7: 1.0, 40: -np.inf}, 1.3, 3, 0.5, 3, 0.5, 3)
    assert len(processors) == 4
    for processor in processors:
        assert not mx.array_equal(processor(tokens, logprobs), logprobs)
    sampling.make_sampler(1.0, 0.9, 0.1, 2, 5, 1.0, 0.1, [1])(logprobs)
    assert np.array_equal(np.array(logprobs), before)
    assert np.array_equal(np.array(tokens), [3, 5, 3, 40])


@pytest.mark.parametrize("temp", [1e-300, 1e-40, 1e-6])
def test_a_tiny_temperature_is_greedy(logprobs, temp):
    sampler = sampling.make_sampler(temp=temp, top_k=3)
    assert sampler(logprobs).tolist() == np.argmax(np.array(logprobs), -1).tolist()


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
        {"temp": float("nan")},
        {"temp": float("inf")},
        {"temp": "hot"},
        {"top_k": 2.5},
        {"xtc_special_tokens": [-1]},
        {"xtc_special_tokens": 5},
    ],
)
def test_values_out_of_range(options):
    with pytest.raises(InputError, match=next(iter(options))):
        sampling.make_sampler(**{"temp": 1.0, **options})


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": -1},
        {"repetition_penalty": float("nan")},
        {"presence_penalty": "x"},
        {"frequency_penalty": float("inf")},
        {"repetition_context_size": 0},
        {"presence_context_size": -3},
        {"logit_bias": {-1: 1.0}},
        {"logit_bias": {"3": 1.0}},
        {"logit_bias": {3: float("nan")}},
        {"logit_bias": [3]},
    ],
)
def test_penalties_out_of_range(options):
    with pytest.raises(InputError, match=next(iter(options))):
        sampling.make_logits_processors(**options)


def test_ids_beyond_the_vocabulary_are_refused(logprobs):
    (bias,) = sampling.make_logits_processors({V: 1.0})
    with pytest.raises(InputError, match=f"{V}, which is out of range"):
        bias(mx.array([1]), logprobs)
    sampler = sampling.make_sampler(1.0, xtc_probability=1.0, xtc_special_tokens=[V])
    with pytest.raises(InputError, match=f"{V}, which is out of range"):
        sampler(logprobs)


def test_a_seeded_sampler_draws_from_its_own_state():
    """Whatever else is drawn, and whether or not XTC draws too."""
    logprobs = mx.zeros((1, 4096))
    for options in ({"temp": 1.0}, {"temp": 0.7, "xtc_probability": 0.5, "xtc_threshold": 0.0}):
        drawn = []
        for seed in (5, 5, 6):
            sample = sampling.make_sampler(**options, seed=seed)
            drawn.append([sample(logprobs).item() for _ in range(6)])
            mx.random.uniform()
        assert drawn[0] == drawn[1] != drawn[2]
        assert len(set(drawn[0])) > 1
    mx.random.seed(3)
    expected = mx.random.uniform().item()
    mx.random.seed(3)
    sampling.make_sampler(temp=1.0, seed=5)(logprobs)
    assert mx.random.uniform().item() == expected

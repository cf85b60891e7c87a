"""Counts the Python calls of a layer for a token, which every step costs the host."""

import gc
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import mlx.core as mx
import pytest

import mlx_moeflux
from mlx_moeflux.conversion import synthesize
from mlx_moeflux.kernels.cpu import blas
from mlx_moeflux.loading import load_model
from tests.models_at_hand import same_bits

PACKAGE = str(Path(mlx_moeflux.__file__).parent)
MOST_CALLS, MOST_FILES = 147, 15
K = 8


def calls_in_package(function) -> list[tuple[str, str]]:
    """(file, function) of each call of a Python function of the package."""
    calls = []

    def note(frame, event, _):
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE):
            calls.append((frame.f_code.co_filename[len(PACKAGE) + 1 :], frame.f_code.co_name))

    # Otherwise what other tests left may be collected meanwhile, and its finalisers are calls too.
    gc.disable()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(None)
        gc.enable()
    return calls


@pytest.mark.skipif(mx.default_device() != mx.cpu, reason="GPUs trace steps")
@pytest.mark.parametrize("family", ["qwen3-tiny", "qwen3.5-tiny", "deepseek-tiny"])
def test_a_layer_takes_few_calls_and_files_for_a_token(family, tmp_path, monkeypatch):
    """All but one expert are resident, and none that is needed is missing."""
    shape = replace(synthesize.SHAPES[family], num_experts_per_tok=K)
    monkeypatch.setitem(synthesize.SHAPES, family, shape)
    # Other tests' models may have filled the cache of dense matrices.
    monkeypatch.setattr(blas.kept, "limit", 2 * blas.KEPT_BYTES + blas.kept.nbytes)
    directory = synthesize.synthesize(family, tmp_path / "model")
    with load_model(directory, expert_memory="50%") as model:
        store, state = model.store, model.make_cache()
        store.resize_all(dict.fromkeys(store.layers, store.num_experts - 1))
        store.preload()
        for ids in ([5, 6, 7, 8], *[[9]] * 3):  # matrices are kept from their second use on
            mx.eval(model(mx.array([ids]), state))
        for number, (layer, entry) in enumerate(zip(model.layers, state, strict=True)):
            calls = calls_without_misses(model, number, partial(layer, cache=entry, chunk=1))
            assert 50 < len(calls) <= MOST_CALLS, calls
            assert len({file for file, _ in calls}) <= MOST_FILES, calls


def calls_without_misses(model, number, layer) -> list[tuple[str, str]]:
    """The calls of `layer` for the first random token whose experts are all resident."""
    for seed in range(50):
        x = mx.random.normal((1, 1, model.config.hidden_size), key=mx.random.key(seed))
        mx.eval(x)
        stats, results = model.store.stats().layers.get(number), []
        before = stats and (stats.hits, stats.misses)
        calls = calls_in_package(lambda: results.append(layer(x)))  # noqa: B023
        assert not same_bits(results[0], x)
        if stats is None or (stats.hits, stats.misses) == (before[0] + K, before[1]):
            return calls
    pytest.fail("every token needs the expert that is missing")

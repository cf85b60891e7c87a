"""Oracle: the resident model's text. Budgets change while it is written, reads fail, and not a
token changes."""

from __future__ import annotations

import os
import threading

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux import generate
from mlx_moeflux.errors import ExpertFileError, InputError, MemoryBudgetError
from mlx_moeflux.experts.io import native_pool
from mlx_moeflux.experts.io.readers import PreadReader
from mlx_moeflux.generation import text
from mlx_moeflux.loading import BUNDLED_MODEL, load, load_model

PROMPT = "class Stack:\n    def push(self, item):\n"
EXPERT_BYTES = 32 * 6 * 27648
LEAST = 4 * 6 * 27648


def texts(model, tokenizer, tokens, between=lambda: None):
    """Greedy ids, with `between` called after every third."""
    ids = mx.array(tokenizer.encode(PROMPT))
    chosen = []
    for token, _ in text.generate_step(ids, model, max_tokens=tokens):
        chosen.append(token)
        if len(chosen) % 3 == 0:
            between()
    return chosen


@pytest.fixture(scope="module")
def right():
    model, tokenizer = load(BUNDLED_MODEL)
    with model:
        assert model.plan.resident
        yield lambda n: texts(model, tokenizer, n)


def storm(right, tokens, *, traced=None, **options):
    """The budget changes every three tokens, at random between the least and everything."""
    random, peaks = np.random.default_rng(tokens), []
    wanted = right(tokens)
    before = mx.get_active_memory()  # what other tests of this process hold
    model, tokenizer = load(BUNDLED_MODEL, expert_memory="50%", **options)
    with model:
        model.compile_steps = traced

        def resize():
            least = 100 * LEAST / EXPERT_BYTES
            budget = f"{random.uniform(least, 100):.3f}%"
            model.set_expert_memory(budget)
            bank = model.store.bank_bytes
            assert bank <= model.plan.budget_bytes <= EXPERT_BYTES
            assert bank > model.plan.budget_bytes - 6 * 27648
            assert all(n == model.plan.slots[layer] for layer, n in model.store.slots.items())
            peaks.append(bank)

        mx.reset_peak_memory()
        assert texts(model, tokenizer, tokens, resize) == wanted
        limit = model.trunk_bytes() + EXPERT_BYTES + model.state_bytes(tokens + 20)
        limit += 20_000_000  # of a prompt's and a step's own arrays: 2 MB
        assert mx.get_peak_memory() - before <= limit
        assert max(peaks) > 1.3 * min(peaks)


@pytest.mark.slow
@pytest.mark.parametrize("traced", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("prefetch", [pytest.param("none", marks=pytest.mark.slow), "ahead"])
def test_a_storm_of_budgets_changes_no_token(right, prefetch, traced):
    storm(right, 50, prefetch=prefetch, traced=traced)  # 16 changes


@pytest.mark.slow
def test_a_long_storm_of_budgets(right):
    storm(right, 2000, eviction="lfu", prefetch="ahead")


@pytest.mark.slow
def test_a_budget_may_change_from_another_thread(right):
    model, tokenizer = load(BUNDLED_MODEL, expert_memory="20%")
    done, failures = threading.Event(), []

    def change():
        budgets = ["15%", "90%", "40%", "13%"]
        while not done.is_set():
            try:
                model.set_expert_memory(budgets[0])
            except Exception as error:  # noqa: BLE001
                failures.append(error)
            budgets.append(budgets.pop(0))
            done.wait(0.01)

    with model:
        other = threading.Thread(target=change)
        other.start()
        try:
            assert texts(model, tokenizer, 20) == right(20)
        finally:
            done.set()
            other.join()
    assert not failures


def test_what_a_budget_cannot_be():
    with load_model(BUNDLED_MODEL) as model, pytest.raises(InputError, match="not streamed"):
        model.set_expert_memory("50%")
    with load_model(BUNDLED_MODEL, expert_memory="50%") as model:
        with pytest.raises(MemoryBudgetError, match=str(LEAST)):
            model.set_expert_memory("1%")
        for budget in ("auto", "some"):
            with pytest.raises(InputError, match=r"number|not an amount"):
                model.set_expert_memory(budget)
        assert set(model.store.slots.values()) == {16}
        model.set_expert_memory(LEAST)
        assert set(model.store.slots.values()) == {4}
        assert str(model.plan).endswith("664 kB was set")
        model.set_expert_memory("1GB")
        assert set(model.store.slots.values()) == {32}


@pytest.mark.slow
@pytest.mark.parametrize("prefetch", [pytest.param("none", marks=pytest.mark.slow), "ahead"])
def test_one_read_in_a_hundred_fails_and_no_token_is_wrong(right, monkeypatch, prefetch):
    """An I/O error ends a call and leaves its cache as it was: the call is made again."""
    random, read, failed = np.random.default_rng(0), PreadReader.read, [0]
    lock = threading.Lock()

    def sometimes(self, layer, expert, into):
        with lock:
            fails = random.random() < 0.01
        if not fails:
            return read(self, layer, expert, into)
        failed[0] += 1
        into[0][:8] = b"\xff" * 8
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(native_pool, "library", lambda: None)
    model, tokenizer = load(BUNDLED_MODEL, expert_memory="20%", prefetch=prefetch)
    monkeypatch.setattr(PreadReader, "read", sometimes)
    with model:
        cache, chosen, raised = model.make_cache(), [], 0
        ids = mx.array(tokenizer.encode(PROMPT))
        while len(chosen) < 60:
            try:
                logits = model(ids[None], cache, last_only=True)
            except ExpertFileError:
                raised += 1
                continue
            chosen.append(logits[0, -1].argmax().item())
            ids = mx.array(chosen[-1:])
    assert failed[0] >= raised > 3
    assert chosen == right(60)


def test_a_generator_whose_read_fails_says_so(monkeypatch):
    def fails(fd, views, offset):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(native_pool, "library", lambda: None)
    model, tokenizer = load(BUNDLED_MODEL, expert_memory="20%")
    with model:
        text = generate(model, tokenizer, PROMPT, max_tokens=3)
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", fails)
            with pytest.raises(ExpertFileError, match="Input/output error"):
                generate(model, tokenizer, "import os, sys, re, json\n", max_tokens=30)
        assert generate(model, tokenizer, PROMPT, max_tokens=3) == text

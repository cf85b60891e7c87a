"""Oracle: sums done by hand, the text of a model whose banks stay, and the time of a wait."""

from __future__ import annotations

import logging
import threading
import time
from types import SimpleNamespace

import pytest

from mlx_moeflux import load
from mlx_moeflux.cache.prompt.cache import PromptCache
from mlx_moeflux.errors import InputError
from mlx_moeflux.experts.budget import RESERVE_BYTES
from mlx_moeflux.generation import elastic
from mlx_moeflux.loading import BUNDLED_MODEL
from mlx_moeflux.server.engine import EngineOptions
from mlx_moeflux.server.memory import ServerMemory
from tests.server.conftest import MESSAGES, served, wait_until
from tests.server.test_protocols import samples

GB = 10**9


def planned(*, experts=4 * GB, usable=12 * GB):
    plan = SimpleNamespace(
        trunk_bytes=GB,
        row_bytes=0,
        draft_bytes=0,
        budget_bytes=experts,
        reserved_bytes=usable // 20,
        usable_bytes=usable,
    )
    return SimpleNamespace(plan=plan, state_bytes=lambda positions: positions * 100_000)


def test_the_parts_add_up_to_what_was_seen():
    memory = ServerMemory.of(planned(), None)
    # 12 - 1 - 4 - 0.6 - 1 of activations = 5.4, half of it for states.
    assert memory.states == 2_700_000_000
    assert sum(memory.parts.values()) + memory.left == memory.usable == 12 * GB
    assert memory.left == 2_700_000_000
    assert str(memory) == (
        "memory 12 GB: trunk 1 GB, experts 4 GB, states 2.7 GB, prompt cache 600 MB, "
        "activations 1 GB, left to files 2.7 GB"
    )


def test_numbers_that_exceed_the_memory_are_told():
    memory = ServerMemory.of(planned(experts=11 * GB), None)
    assert memory.states == 819_200_000
    assert memory.left == -(1 + 11 + 1) * GB - 600_000_000 - 819_200_000 + 12 * GB
    assert str(memory).endswith("activations 1 GB, 2.42 GB more than there is")
    assert ServerMemory.of(planned(), 3 * GB).states == 3 * GB


def test_auto_leaves_what_a_prompt_cache_gets():
    model, _ = load(BUNDLED_MODEL, expert_memory="50%", reserved_memory="5%")
    with model:
        plan = model.plan
        assert plan.reserved_bytes == plan.usable_bytes // 20
        memory = ServerMemory.of(model, None)
        assert memory.prompt_cache == plan.reserved_bytes
        assert memory.experts == plan.budget_bytes == model.store.bank_bytes
        assert memory.activations == RESERVE_BYTES
        assert sum(memory.parts.values()) + memory.left == plan.usable_bytes
    with pytest.raises(InputError, match="the reserved memory is 'auto'"):
        load(BUNDLED_MODEL, reserved_memory="auto")


class Pressure:
    """A system whose memory a test makes scarce."""

    now = False

    def scarce(self) -> bool:
        return self.now


@pytest.fixture
def pressed(tiny, monkeypatch):
    """A running server and the pressure that it sees; growth takes no time."""
    monkeypatch.setattr(elastic, "CALM_SECONDS", 0.0)
    monkeypatch.setattr(elastic, "ROOM_BYTES", -GB * 1000)
    pressure, model = Pressure(), tiny[0]
    options = EngineOptions(pressure=pressure, max_pause=0.0)
    try:
        with PromptCache() as cache, served(*tiny, engine=options, cache=cache) as server:
            yield server, pressure
    finally:
        model.set_expert_memory("50%")


@pytest.mark.parametrize("look", [0.05, pytest.param(elastic.LOOK_SECONDS, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_an_idle_server_shrinks_within_two_seconds_and_grows_back(
    pressed, monkeypatch, caplog, look
):
    monkeypatch.setattr(elastic, "LOOK_SECONDS", look)
    server, pressure = pressed
    wait_until(lambda: server.service.ready)
    full = samples(server)["mlx_moeflux_expert_memory_bytes"]
    with caplog.at_level(logging.WARNING, "mlx_moeflux.server"):
        began, pressure.now = time.monotonic(), True
        wait_until(lambda: server.service.engine.elastic.shrunk)
        assert time.monotonic() - began < 2
        wait_until(lambda: server.service.engine.elastic.shrunk == 3)
        assert set(server.service.model.store.slots.values()) == {4}
        found = samples(server)
        assert found["mlx_moeflux_expert_memory_bytes"] < 0.3 * full
        assert found["mlx_moeflux_expert_memory_shrinks_total"] == 3  # of 16: 12, 8, 4
        pressure.now = False
        wait_until(lambda: server.service.engine.elastic.grown == 3)
        assert set(server.service.model.store.slots.values()) == {16}
    found = samples(server)
    assert found["mlx_moeflux_expert_memory_grows_total"] == 3
    assert found["mlx_moeflux_expert_memory_bytes"] == full
    said = [record.getMessage() for record in caplog.records]
    assert said[0].startswith("the system lacks memory: experts shrink from ")
    assert said[-1].startswith("memory is free again: experts grow from ")


def test_replies_stay_while_banks_change(pressed, monkeypatch):
    monkeypatch.setattr(elastic, "LOOK_SECONDS", 0.02)
    server, pressure = pressed
    body = {"messages": [{"role": "user", "content": "x " * 60}], "max_tokens": 12}
    path = "/v1/chat/completions"
    _, expected = server.ask(path, body)
    engine, done, replies, changed = server.service.engine, threading.Event(), [], []
    engine.elastic._tell = lambda line: changed.append(engine.live)

    def toggle():
        while not done.wait(0.03):
            pressure.now = not pressure.now

    thread = threading.Thread(target=toggle)
    thread.start()
    pressure.now = True
    try:
        for i in range(2):
            other = {**body, "messages": [*MESSAGES, *body["messages"]], "max_tokens": 2 + i}
            server.ask(path, other)
            replies.append(server.ask(path, {**body, "seed": i})[1])
    finally:
        done.set()
        thread.join()
    assert [reply["choices"] for reply in replies] == [expected["choices"]] * 2
    assert any(changed), "the banks changed while no reply ran"

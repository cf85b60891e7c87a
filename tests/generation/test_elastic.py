"""Oracle: the text of a model whose banks never change, slots divided by hand, and simulated
machines whose memory a bank shares with other programs."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import pytest

from mlx_moeflux import generate, load
from mlx_moeflux.experts import system_memory
from mlx_moeflux.experts.streaming.bank import LayerBank
from mlx_moeflux.experts.system_memory import LinuxPressure, MacPressure, open_pressure
from mlx_moeflux.generation import elastic as module
from mlx_moeflux.generation.elastic import (
    CALM_LOOK_SECONDS,
    CALM_SECONDS,
    LONGEST_WAIT,
    ROOM_BYTES,
    SETTLE_SECONDS,
    ElasticBanks,
    elastic_banks,
)
from mlx_moeflux.generation.idle import Idle
from mlx_moeflux.generation.text import stream_generate
from mlx_moeflux.loading import BUNDLED_MODEL
from mlx_moeflux.tokenizer import load_tokenizer
from tests.experts.simulated_mac import GIB, Machine

PROMPT = "class Stack:\n    def push(self, item):\n"
GB = 10**9


class World:
    """A machine whose memory and clock a test sets, and a model's elastic banks on it."""

    def __init__(self, model, **options):
        self.now, self.scarce, self.free, self.looks = 0.0, False, 8 * GB, 0
        self.lines: list[str] = []
        self.model = model
        pressure = SimpleNamespace(scarce=self._said)
        self.elastic = ElasticBanks(
            model.runtime,
            pressure,
            self.lines.append,
            available=lambda: self.free,
            clock=lambda: self.now,
            **options,
        )

    def _said(self):
        self.looks += 1
        return self.scarce

    def after(self, seconds, **changes):
        """Return the slots of the first layer after a look at a later time."""
        vars(self).update(changes)
        self.now += seconds
        self.elastic.look()
        counts = set(self.model.store.streaming.slots.values())
        assert len(counts) == 1
        return counts.pop()


@pytest.fixture
def world(two_bundled_layers):
    model, _ = load(two_bundled_layers, expert_memory="75%")
    with model:
        assert set(model.store.streaming.slots.values()) == {24}
        yield World(model)


def test_banks_shrink_to_the_experts_of_a_token_and_grow_back(world):
    assert world.after(1) == 24
    assert [world.after(0.5, scarce=True) for _ in range(6)] == [18, 12, 6, 4, 4, 4]
    assert (world.elastic.shrunk, world.elastic.grown) == (4, 0)
    grown = [world.after(CALM_SECONDS + 1, scarce=False, free=10 * GB) for _ in range(5)]
    assert grown == [6, 12, 18, 24, 24]
    assert (world.elastic.shrunk, world.elastic.grown) == (4, 4)
    assert world.lines[0] == "the system lacks memory: experts shrink from 1.33 MB to 995 kB"
    assert world.lines[-1] == "memory is free again: experts grow from 995 kB to 1.33 MB"
    assert len(world.lines) == 8
    assert world.model.plan.budget_bytes == 1_327_104  # the plan stays


def test_the_system_is_asked_at_most_twice_a_second(world):
    for _ in range(1000):
        world.after(0.01)
    assert 19 <= world.looks <= 20


def test_a_step_back_leaves_room(world):
    assert world.after(1, scarce=True) == 18
    step = 2 * 6 * 27648
    assert world.after(CALM_SECONDS - 1, scarce=False, free=20 * GB) == 18
    assert world.after(0.5, free=ROOM_BYTES + step - 1) == 18
    assert world.after(60) == 18
    assert world.after(60, free=ROOM_BYTES + step) == 24


def test_a_step_back_leaves_what_the_system_needs(world):
    world.elastic = ElasticBanks(
        world.model.runtime,
        SimpleNamespace(scarce=lambda: world.scarce),
        world.lines.append,
        available=lambda: world.free,
        least=3 * GB,
        clock=lambda: world.now,
    )
    assert world.after(1, scarce=True) == 18
    assert world.after(60, scarce=False, free=3 * GB + ROOM_BYTES) == 18
    assert world.after(60, free=3 * GB + 2 * ROOM_BYTES) == 24


def test_a_step_back_that_brought_shortage_waits_longer(world):
    """20 seconds, then 80, unless more than before it can be had; other steps do not wait."""
    assert [world.after(0.5, scarce=True) for _ in range(2)] == [18, 12]
    assert world.after(CALM_SECONDS, scarce=False) == 18
    for wait in (20, 80):
        assert world.after(0.5, scarce=True) == 12
        for _ in range(int(wait / CALM_SECONDS) - 1):
            assert world.after(CALM_SECONDS, scarce=False) == 12
        assert world.after(CALM_SECONDS) == 18
    assert world.after(0.5, scarce=True) == 12
    assert world.after(CALM_SECONDS, scarce=False, free=8 * GB + ROOM_BYTES - 1) == 12
    assert world.after(CALM_SECONDS, free=8 * GB + ROOM_BYTES) == 18
    assert world.after(CALM_SECONDS) == 24


def test_a_step_back_that_held_is_trusted_again(world):
    assert [world.after(0.5, scarce=True) for _ in range(2)] == [18, 12]
    assert world.after(CALM_SECONDS, scarce=False) == 18
    assert world.after(0.5, scarce=True) == 12
    assert [world.after(CALM_SECONDS, scarce=False) for _ in range(3)] == [12, 18, 24]
    assert [world.after(0.5, scarce=True) for _ in range(2)] == [18, 12]
    assert [world.after(CALM_SECONDS, scarce=False) for _ in range(3)] == [18, 18, 24]
    # A shortage long after is another one.
    assert world.after(SETTLE_SECONDS, scarce=True) == 18
    assert world.after(CALM_SECONDS, scarce=False) == 24


def test_one_step_back_needs_a_calm_time_of_its_own(world):
    assert [world.after(0.5, scarce=True) for _ in range(2)] == [18, 12]
    assert world.after(CALM_SECONDS, scarce=False, free=10 * GB) == 18
    assert world.after(1) == 18
    assert world.after(0.5, scarce=True) == 12
    assert world.after(CALM_SECONDS - 1, scarce=False) == 12
    assert world.after(1, free=11 * GB) == 18


def test_slots_that_somebody_sets_are_the_new_ones(world):
    assert world.after(1, scarce=True) == 18
    world.model.set_expert_memory("50%")
    assert world.after(60, scarce=False, free=10 * GB) == 16
    assert [world.after(0.5, scarce=True) for _ in range(4)] == [12, 8, 4, 4]
    grown = [world.after(CALM_SECONDS, scarce=False, free=20 * GB) for _ in range(4)]
    assert grown == [8, 12, 16, 16]


def test_a_budget_of_one_token_stays():
    model, _ = load(BUNDLED_MODEL, expert_memory="12.5%")
    with model:
        world = World(model)
        assert [world.after(1, scarce=True) for _ in range(3)] == [4, 4, 4]
        assert (world.elastic.shrunk, world.lines) == (0, [])


def test_no_memory_for_a_smaller_bank_leaves_a_working_model(world, monkeypatch):
    allocate, refused = LayerBank._allocate, []

    def scarce(bank, slots):
        if len(refused) < 1 and slots == 18 and bank is list(layers.values())[1].bank:
            refused.append(slots)
            raise RuntimeError("[malloc] Unable to allocate 1000 bytes.")
        return allocate(bank, slots)

    layers = world.model.store._layers
    with monkeypatch.context() as patch:
        patch.setattr(LayerBank, "_allocate", scarce)
        world.now, world.scarce = 1.0, True
        world.elastic.look()
    assert refused
    assert set(world.model.store.streaming.slots.values()) == {18, 24}
    assert world.after(0.5) == 12
    assert [world.after(60, scarce=False, free=20 * GB) for _ in range(3)] == [18, 24, 24]


@pytest.mark.parametrize("memory", ["75%", pytest.param("100%", marks=pytest.mark.slow)])
def test_only_banks_in_the_memory_of_the_system_are_elastic(memory, monkeypatch):
    model, _ = load(BUNDLED_MODEL, expert_memory=memory)
    pressure = SimpleNamespace(scarce=lambda: True)
    with model:
        found = elastic_banks(model.runtime, pressure, print)
        assert (found is not None) == (memory == "75%" and not mx.cuda.is_available())
        assert elastic_banks(model.runtime, None, print) is None
        monkeypatch.setattr(module.device, "kind", lambda: "cuda")
        assert elastic_banks(model.runtime, pressure, print) is None


def test_text_stays_while_banks_shrink_and_grow(world):
    model, tokenizer = world.model, load_tokenizer(BUNDLED_MODEL)
    expected = generate(model, tokenizer, PROMPT, max_tokens=9)
    text, slots = "", []
    for i, step in enumerate(stream_generate(model, tokenizer, PROMPT, max_tokens=9)):
        text += step.text
        slots.append(world.after(60, scarce=i < 4, free=(10 + i) * GB))
    assert text == expected
    assert slots[:8] == [18, 12, 6, 4, 6, 12, 18, 24]


# ---- Simulated machines

LAYERS, BLOCK = 40, 1.77e6


class Bank:
    """A model of 40 layers with 32 slots, in as many lines as :class:`ElasticBanks` needs."""

    def __init__(self, changed=lambda nbytes: None):
        slots = dict.fromkeys(range(LAYERS), 32)
        self.streaming = SimpleNamespace(slots=slots, most_slots=8, bank_bytes=0)
        self.store = SimpleNamespace(
            streaming=self.streaming, block_bytes=dict.fromkeys(slots, int(BLOCK))
        )
        self.router = SimpleNamespace(num_experts_per_tok=8)
        self.changed = changed
        self.resize_banks(slots)

    def resize_banks(self, slots):
        self.streaming.slots.update(slots)
        self.streaming.bank_bytes = sum(slots.values()) * BLOCK
        self.changed(self.streaming.bank_bytes)

    @property
    def slots(self):
        return self.streaming.slots[0]


@pytest.fixture
def on_a_mac(monkeypatch):
    """Return a function that makes a :class:`Machine` and a bank on it, seen by vm_stat."""

    def make(gib, **wanted):
        machine = Machine(gib * GIB, **wanted, bank=0)
        bank = Bank(lambda nbytes: machine.after(0, bank=nbytes))
        machine.shown(monkeypatch)
        clock = lambda: machine.now  # noqa: E731
        banks = ElasticBanks(
            bank, MacPressure(clock), print, calm_look=CALM_LOOK_SECONDS, clock=clock
        )

        def run(seconds, programs=None):
            """Let time pass; other programs take or give up memory evenly."""
            steps = int(2 * seconds)
            grow = 0 if programs is None else (programs - machine.programs) / steps
            for _ in range(steps):
                machine.after(0.5, programs=machine.programs + grow)
                banks.look()
                yield bank.slots

        return machine, bank, banks, run

    return make


@pytest.mark.parametrize(("gib", "others"), [(8, 1.2), (16, 7.0), (64, 49.0)])
def test_a_bank_is_whole_within_a_minute_after_another_program_has_ended(on_a_mac, gib, others):
    machine, bank, banks, run = on_a_mac(gib, wired=0.18 * gib * GIB, programs=0.15 * gib * GIB)
    assert set(run(120)) == {32}
    before = machine.programs
    levels = []
    for _ in run(30, before + (others + 4) * GB):
        levels.append(machine.pages.level)
    assert bank.slots < 32
    assert set(levels) == {1}  # the system's level had not warned yet
    machine.after(0, programs=before)
    slots = list(run(60))
    assert slots[-1] == 32
    assert set(run(1200)) == {32}
    assert banks.grown == banks.shrunk <= 4


def test_a_bank_that_would_leave_no_room_stays_small(on_a_mac):
    """The other program stays: with the whole bank less than ROOM_BYTES would be left."""
    machine, bank, banks, run = on_a_mac(8, wired=1.5 * GB, programs=2.0 * GB)
    list(run(20, 5.2 * GB))
    assert bank.slots < 32
    list(run(600))
    steps = banks.shrunk + banks.grown
    left = machine.pages.to_be_had
    assert left < 2 * ROOM_BYTES
    assert machine.pages.level == 1
    list(run(3600))
    assert banks.shrunk + banks.grown - steps <= 2 * 3600 / LONGEST_WAIT


@pytest.mark.parametrize("whole", [16, 24])
def test_growth_that_brings_shortage_back_does_not_oscillate(whole):
    """A machine that seems to have room for all, on which memory is scarce with more than `whole`
    slots a layer."""
    now, bank = [0.0], Bank()
    pressure = SimpleNamespace(scarce=lambda: bank.slots > whole)
    banks = ElasticBanks(bank, pressure, print, available=lambda: 6 * GB, clock=lambda: now[0])

    def run(seconds):
        for _ in range(int(2 * seconds)):
            now[0] += 0.5
            banks.look()

    run(600)
    assert bank.slots <= whole
    assert banks.grown <= 4
    run(3600)
    assert banks.grown <= 4 + 3600 / LONGEST_WAIT
    # The cause is gone, which nothing but the calm tells.
    pressure.scarce = lambda: False
    run(LONGEST_WAIT + 4 * CALM_SECONDS)
    assert bank.slots == 32


def test_one_shortage_by_chance_after_a_step_back_costs_ten_seconds():
    now, bank, scarce = [0.0], Bank(), [True]
    pressure = SimpleNamespace(scarce=lambda: scarce[0])
    banks = ElasticBanks(bank, pressure, print, available=lambda: 6 * GB, clock=lambda: now[0])

    def run(seconds):
        for _ in range(int(2 * seconds)):
            now[0] += 0.5
            banks.look()

    run(3)
    scarce[0] = False
    run(CALM_SECONDS)
    assert bank.slots == 16
    scarce[0] = True
    run(3)
    scarce[0] = False
    run(60)
    assert bank.slots == 32


def test_a_linux_that_its_least_share_makes_scarce_does_not_oscillate(monkeypatch):
    """Growth that would leave less than a twentieth of the memory is not tried."""
    total, others, now = 16 * GB, 13.2 * GB, [0.0]
    bank = Bank()
    left = lambda: int(total - others - bank.streaming.bank_bytes)  # noqa: E731
    monkeypatch.setattr(system_memory, "available_memory", lambda: (left(), {}))
    monkeypatch.setattr(module, "available_memory", lambda: (left(), {}))
    monkeypatch.setattr(system_memory, "whole_memory", lambda: total)
    monkeypatch.setattr(system_memory.sys, "platform", "linux")
    banks = elastic_banks(
        SimpleNamespace(
            store=SimpleNamespace(**vars(bank.store), ranks=None),
            router=bank.router,
            resize_banks=bank.resize_banks,
        ),
        LinuxPressure([Path("absent")]),
        print,
    )
    if banks is None:
        pytest.skip("banks are not in the system's memory")
    monkeypatch.setattr(banks, "_clock", lambda: now[0])
    banks._next = now[0]
    for _ in range(7200):
        now[0] += 0.5
        banks.look()
    assert bank.slots < 32
    assert (banks.shrunk, banks.grown) == (1, 0)
    others -= 4 * GB
    for _ in range(120):
        now[0] += 0.5
        banks.look()
    assert bank.slots == 32


def test_a_calm_mac_is_asked_every_two_seconds(on_a_mac, monkeypatch):
    _, bank, _, run = on_a_mac(16, wired=3 * GB, programs=3 * GB)
    asked = []
    counters = system_memory._counters
    monkeypatch.setattr(system_memory, "_counters", lambda: asked.append(0) or counters())
    list(run(60))
    assert 29 <= len(asked) <= 31
    banks = elastic_banks(
        SimpleNamespace(store=SimpleNamespace(**vars(bank.store), ranks=None)),
        open_pressure(),
        print,
    )
    assert banks is None or banks._calm_look == CALM_LOOK_SECONDS


# ---- A wait for a prompt


def test_ten_idle_minutes_give_nothing_up(world):
    slots = world.model.store.streaming.slots
    idle = Idle(world.model, None, world.elastic, lambda: world.now)
    for _ in range(1200):
        assert idle.pause == 0.5
        world.now += idle.pause
        idle.look()
    assert not idle.released
    assert world.model.store.streaming.slots == slots
    assert world.looks == 1200


def test_a_wait_shrinks_and_then_releases(world):
    idle = Idle(world.model, 10.2, world.elastic, lambda: world.now)
    world.scarce, found = True, []
    while (pause := idle.pause) is not None:
        world.now += pause
        idle.look()
        found.append(next(iter(world.model.store.streaming.slots.values())))
    assert world.now == pytest.approx(10.2)
    assert found[:5] == [18, 12, 6, 4, 4]
    assert idle.released
    assert Idle(world.model, None, None).pause is None


def test_a_token_after_a_release_reads_what_was_in_memory(world):
    """Its bound: the bytes of the banks, and what the prompt itself misses."""
    model, tokenizer = world.model, load_tokenizer(BUNDLED_MODEL)
    expected = generate(model, tokenizer, PROMPT, max_tokens=1)
    streaming, stats = model.store.streaming, model.store.stats()
    held = sum(len(streaming.residents(layer)) for layer in streaming.slots)
    model.release()
    before = stats.total
    assert generate(model, tokenizer, PROMPT, max_tokens=1) == expected
    after = stats.total.since(before)
    assert after.reads == held + after.misses
    assert (after.reads - after.misses) * 27648 <= model.plan.budget_bytes


def test_banks_of_a_released_model_shrink_without_a_read(world):
    generate(world.model, load_tokenizer(BUNDLED_MODEL), PROMPT, max_tokens=2)
    world.model.release()
    reads, active = world.model.store.stats().total.reads, mx.get_active_memory()
    assert world.after(1, scarce=True) == 18
    assert world.model.store.stats().total.reads == reads
    assert mx.get_active_memory() <= active


@pytest.mark.slow
def test_a_process_that_stalls_the_machine(tmp_path, monkeypatch):
    """With real time: a file of pressure that rises stands for the machine's."""
    file = tmp_path / "memory"
    line = "some avg10=0.00 avg60=0.00 avg300=0.00 total={}\n"
    file.write_text(line.format(0))
    monkeypatch.setattr(system_memory, "AVAILABLE_SHARE", 2.0)
    model, tokenizer = load(BUNDLED_MODEL, expert_memory="75%")
    stop, stalled = threading.Event(), threading.Event()

    def rise():
        total = 0
        while not stop.wait(0.05):
            total += 40_000 * stalled.is_set()
            other = tmp_path / "next"
            other.write_text(line.format(total))
            os.replace(other, file)

    thread = threading.Thread(target=rise)
    thread.start()
    try:
        with model:
            expected = generate(model, tokenizer, PROMPT, max_tokens=20)
            elastic = ElasticBanks(model.runtime, LinuxPressure([file]), print, available=lambda: 0)
            began = shrunk = None
            while elastic.shrunk < 4:
                assert generate(model, tokenizer, PROMPT, max_tokens=20) == expected
                elastic.look()
                if began is None:
                    began = time.monotonic()
                    stalled.set()
                if elastic.shrunk and shrunk is None:
                    shrunk = time.monotonic()
                assert time.monotonic() - began < 60
            assert shrunk - began < 2
    finally:
        stop.set()
        thread.join()

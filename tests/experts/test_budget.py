"""Oracle: sums done by hand, and the properties that a distribution must have."""

import subprocess
import sys
from types import SimpleNamespace

import mlx.core as mx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlx_moeflux.errors import InputError, MemoryBudgetError
from mlx_moeflux.experts import system_memory
from mlx_moeflux.experts.budget import (
    Memory,
    format_bytes,
    make_plan,
    measure_memory,
    parse_budget,
    parse_share,
    round_up,
    slots_for_budget,
    smallest_budget,
)

GB = 10**9


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("2GB", 2 * GB),
        ("2GiB", 2 << 30),
        ("512MB", 512 * 10**6),
        ("512 mib", 512 << 20),
        ("1.5GB", 1_500_000_000),
        (".5 kB", 500),
        ("3TB", 3 * 10**12),
        ("50%", 500),
        ("12.5 %", 125),
        ("100%", 1000),
        ("4096B", 4096),
        ("0.25 GiB", 1 << 28),
        (4096, 4096),
        (1.5e9, 1_500_000_000),
        ("auto", None),
        (" AUTO ", None),
    ],
)
def test_parse(text, count):
    assert parse_budget(text, 1000) == count


@pytest.mark.parametrize(
    "text",
    ["", "GB", "2 apples", "-1GB", "0", "0%", "1e9", "2GBs", "nan", 0, -5, 0.5, float("nan"), True],
)
def test_what_is_no_amount(text):
    with pytest.raises(InputError, match="give one such as 2GB, 512MiB, 50% or auto"):
        parse_budget(text, 1000)


SHARES = {"4": "4%", "16": "16%", "1.5": "1.5%", ".5": "50%", "0.25": "25%"}


@pytest.mark.parametrize("text", ["4", "16", "1.5", " 4096 ", ".5", "0.25", "2000000000"])
def test_a_text_without_a_unit_is_no_amount(text):
    number = text.strip()
    with pytest.raises(InputError) as caught:
        parse_budget(text, 1000)
    share = SHARES.get(number, f"{number}B")
    message = f"{text!r} has no unit; give one, such as {number}GB, {number}MiB or {share}."
    assert str(caught.value) == message
    with pytest.raises(InputError, match=f"{number}MiB or {number}B."):
        parse_budget(text, 0)  # of what is not known


@pytest.mark.parametrize("text", ["16G", "16k", "1.5Gi", " 2m "])
def test_half_a_unit_is_no_amount(text):
    with pytest.raises(InputError) as caught:
        parse_budget(text, 1000)
    assert str(caught.value) == f"{text!r} has half a unit; write {text.strip()}B."
    assert parse_budget(f"{text}B".replace(" B", "B"), 1000)


@pytest.mark.parametrize("text", ["101%", "100.001 %", "9" * 30 + "%"])
def test_there_is_no_more_than_all(text):
    with pytest.raises(InputError, match=r"the cache '[\d. %]+' is more than all; .* 100%\.$"):
        parse_budget(text, 1000, what="cache")
    with pytest.raises(InputError, match=r"row memory .* is more than all"):
        parse_share(text, 1000)


def test_digits_without_end_are_no_amount():
    for text in ("9" * 5000 + "GB", "0." + "9" * 5000 + "GB", "1" + "0" * 400 + "%"):
        with pytest.raises(InputError, match="is not an amount"):
            parse_budget(text, 1000)


@given(st.integers(1, 10**14), st.integers(1, 400))
def test_a_share_is_exact(total, quarters):
    assert parse_budget("100%", total) == total
    assert parse_budget("100.00 %", total) == total
    if total * quarters >= 400:
        assert parse_budget(f"{quarters / 4}%", total) == total * quarters // 400


@given(st.integers(1, 10**14))
def test_what_is_shown_of_a_least_budget_is_enough(count):
    shown = round_up(count)
    assert count <= shown <= count + max(0, count // 99)
    assert parse_budget(format_bytes(shown), 0) == shown


def test_format():
    counts = (0, 999, 1770, 1_769_472, 2 * GB, 202.5e9, 3e12)
    written = ["0 B", "999 B", "1.77 kB", "1.77 MB", "2 GB", "202 GB", "3 TB"]
    assert [format_bytes(c) for c in counts] == written


def test_slots_by_hand():
    blocks = {3: 100, 4: 100, 5: 250}
    options = {"num_experts": 8, "experts_per_token": 2}
    assert smallest_budget(blocks, 2, 70) == 970
    assert slots_for_budget(970, blocks, staging_bytes=70, **options) == {3: 2, 4: 2, 5: 2}
    assert slots_for_budget(1000, blocks, **options) == {3: 3, 4: 2, 5: 2}
    assert slots_for_budget(1250, blocks, **options) == {3: 3, 4: 3, 5: 2}
    assert slots_for_budget(1251 + 99, blocks, **options) == {3: 3, 4: 3, 5: 3}
    assert slots_for_budget(10**9, blocks, **options) == {3: 8, 4: 8, 5: 8}
    with pytest.raises(
        MemoryBudgetError, match=r"969 bytes .* 2 experts in each of 3 .* works is 970 bytes"
    ):
        slots_for_budget(969, blocks, staging_bytes=70, **options)


@given(
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=6),
    num_experts=st.integers(1, 9),
    extra=st.integers(0, 2000),
    staging=st.integers(0, 40),
    data=st.data(),
)
def test_slots_fill_the_budget_evenly(sizes, num_experts, extra, staging, data):
    k = data.draw(st.integers(1, num_experts))
    blocks = dict(enumerate(sizes, start=3))
    asked = smallest_budget(blocks, k, staging) + extra
    slots = slots_for_budget(
        asked, blocks, num_experts=num_experts, experts_per_token=k, staging_bytes=staging
    )
    spent = sum(slots[layer] * blocks[layer] for layer in blocks) + staging
    counts = list(slots.values())
    assert spent <= asked
    assert min(counts) >= k
    assert max(counts) <= min(num_experts, min(counts) + 1)
    unfilled = [blocks[layer] for layer in blocks if slots[layer] == min(counts) < num_experts]
    assert all(spent + size > asked for size in unfilled)


def plan(asked="auto", free=40 * GB, trunk=2 * GB, kv=GB // 2, block=2 * 10**6, **changes):
    memory = Memory("cpu", free, free * 6 // 10, "0.6 of the available memory")
    options = {"num_experts": 256, "experts_per_token": 8, "staging_bytes": 0} | changes
    blocks = dict.fromkeys(range(40), block)
    return make_plan(asked, blocks, trunk_bytes=trunk, kv_bytes=kv, memory=memory, **options)


def test_auto_is_resident_exactly_while_everything_fits():
    """Experts 20.48 GB, trunk 2, state 0.5, reserve 1: 23.98 GB of 0.6 x 40 = 24."""
    fits = plan()
    assert fits.resident
    assert set(fits.slots.values()) == {256}
    assert fits.budget_bytes == fits.expert_bytes == 20_480_000_000
    assert plan(trunk=2_020_000_000).resident
    assert not plan(trunk=2_020_000_001).resident
    assert str(fits) == (
        "experts resident, trunk 2 GB, experts 20.5 GB, budget 20.5 GB (256 slots a layer), "
        "free memory 40 GB: 24 GB with states and 1 GB spare fit in 0.6 of the available "
        "memory, 24 GB"
    )


def test_auto_takes_half_of_what_is_left():
    """0.6 x 30 = 18 less 3.5 leaves 14.5: 7.25 GB are 90 blocks of 2 MB in each of 40 layers."""
    half = plan(free=30 * GB)
    assert not half.resident
    assert half.budget_bytes == 7_250_000_000
    assert [half.slots[layer] for layer in (0, 24, 25, 39)] == [91, 91, 90, 90]
    assert str(half) == (
        "experts streamed, trunk 2 GB, experts 20.5 GB, budget 7.25 GB (90-91 slots a layer), "
        "free memory 30 GB, reader pread: 24 GB with states and 1 GB spare exceed 0.6 of "
        "the available memory, 18 GB; half of what is left"
    )


def test_auto_with_too_little_takes_the_least():
    least = plan(free=4 * GB, staging_bytes=1000)
    assert least.budget_bytes == 40 * 8 * 2 * 10**6 + 1000
    assert set(least.slots.values()) == {8}
    assert least.why.endswith("the smallest budget that works")


def test_an_asked_budget_is_taken():
    asked = plan("25%")
    assert asked.budget_bytes == 5_120_000_000
    assert set(asked.slots.values()) == {64}
    assert asked.why == "25% was asked for"
    assert plan("100%", free=GB).resident
    assert plan(64 * 40 * 2 * 10**6).slots == asked.slots
    with pytest.raises(MemoryBudgetError, match=r"works is 640000000 bytes \(640 MB\)"):
        plan("639MB")


def test_measured_memory_is_plausible():
    memory = measure_memory()
    assert memory.backend == ("cpu" if mx.default_device() == mx.cpu else memory.backend)
    assert 0 < memory.usable_bytes <= memory.free_bytes < 1 << 48


# As macOS prints it, with pages of 16 KiB: 2.5 GiB free and read ahead, 3 inactive, 0.5 purgeable.
VM_STAT = """Mach Virtual Memory Statistics: (page size of 16384 bytes)
Pages free:                              131072.
Pages active:                            900000.
Pages inactive:                          196608.
Pages speculative:                        32768.
Pages throttled:                              0.
Pages wired down:                        400000.
Pages purgeable:                          32768.
"Translation faults":                 123456789.
Pages copy-on-write:                    1234567.
Pages zero filled:                     12345678.
Pages occupied by compressor:            555555.
"""
ASSUMED = 'assumed, because vm_stat has no "File-backed pages", of inactive pages'
SEEN = f"(2.68 GB free, 3.22 GB {ASSUMED}, 537 MB purgeable)"


@pytest.fixture
def macos(monkeypatch):
    """A Mac of 32 GiB whose counters and working set a test may change; called for its device."""
    mac = SimpleNamespace(text=VM_STAT, error=None, working_set=24 * GB, total=32 << 30)

    def run(command, **_):
        assert command == ["/usr/bin/vm_stat"]
        if mac.error:
            raise mac.error
        return SimpleNamespace(stdout=mac.text.encode())

    def on(device):
        monkeypatch.setattr(mx, "default_device", lambda: device)
        return measure_memory()

    mac.on = on
    sizes = {"SC_PHYS_PAGES": lambda: mac.total // 16384, "SC_PAGE_SIZE": lambda: 16384}
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(system_memory._Silent, "until", 0.0)
    monkeypatch.setattr(system_memory.subprocess, "run", run)
    monkeypatch.setattr(system_memory.os, "sysconf", lambda name: sizes[name]())
    monkeypatch.setattr(mx.metal, "is_available", lambda: True)
    info = lambda _: {"max_recommended_working_set_size": mac.working_set}  # noqa: E731
    monkeypatch.setattr(mx, "device_info", info)
    return mac


def test_auto_sees_other_programs_of_a_mac(macos):
    available = 6 << 30
    busy = macos.on(mx.gpu)
    assert (busy.backend, busy.free_bytes) == ("metal", available)
    assert busy.usable_bytes == int(0.9 * available)
    assert busy.what == f"0.9 of the available memory {SEEN}"
    # The working set stays the limit where more is available.
    macos.text = VM_STAT.replace("131072.", "1310720.")
    idle = macos.on(mx.gpu)
    assert (idle.free_bytes, idle.usable_bytes) == (24 * GB, int(0.9 * 24 * GB))
    assert idle.what == f"0.9 of the recommended working set, {ASSUMED}"
    # The CPU of a Mac sees them too.
    macos.text = VM_STAT
    cpu = macos.on(mx.cpu)
    assert (cpu.backend, cpu.free_bytes) == ("cpu", available)
    assert cpu.usable_bytes == int(0.6 * available)
    assert cpu.what == f"0.6 of the available memory {SEEN}"


def test_pages_of_4_kib_and_counters_that_an_older_macos_lacks(macos):
    macos.text = VM_STAT.replace("16384", "4096").replace("Pages speculative", "Pages other")
    macos.text = macos.text.replace("Pages purgeable", "Pages else")
    assert macos.on(mx.gpu).free_bytes == 4096 * (131072 + 196608)


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", None),
        ("Pages free: 5.\n", None),
        (VM_STAT.replace("Pages free", "Pages"), None),
        (VM_STAT, FileNotFoundError("/usr/bin/vm_stat")),
        (VM_STAT, subprocess.TimeoutExpired("vm_stat", 10)),
        (VM_STAT, subprocess.CalledProcessError(1, "vm_stat")),
    ],
)
def test_without_counters_the_working_set_is_the_limit(macos, text, error):
    macos.text, macos.error = text, error
    found = macos.on(mx.gpu)
    assert found.free_bytes == 24 * GB
    assumed = "assumed, because vm_stat gives no counters"
    assert found.what == f"0.9 of the recommended working set, {assumed}"
    cpu = macos.on(mx.cpu)
    assert cpu.free_bytes == 32 << 30
    assert cpu.what == f"0.6 of the available memory (34.4 GB {assumed})"


def test_counters_are_never_more_than_the_memory(macos):
    macos.total = 4 << 30
    assert macos.on(mx.gpu).free_bytes == 4 << 30


def test_pages_of_files_are_available_less_the_code_of_programs(macos):
    """8 % of 8.05 GB are 644 MB. Inactive and speculative pages are among those of files or are
    other programs'."""
    macos.text = VM_STAT + "File-backed pages:                       327680.\n"
    found = macos.on(mx.gpu)
    files, free, purgeable = 16384 * 327680, 2 << 30, 1 << 29
    assert found.free_bytes == free + purgeable + files - int(0.08 * (free + purgeable + files))
    assert found.what == (
        "0.9 of the available memory (2.15 GB free, 537 MB purgeable, 5.37 GB of files, "
        "less 644 MB assumed to be code of running programs)"
    )
    macos.text = VM_STAT + "File-backed pages:                       1310720.\n"
    assert "less 1 GB assumed" in macos.on(mx.gpu).what


def test_the_line_of_the_plan_says_what_was_seen(macos):
    options = {"num_experts": 256, "experts_per_token": 8, "kv_bytes": GB // 2}
    blocks = dict.fromkeys(range(40), 2 * 10**6)
    made = make_plan("auto", blocks, trunk_bytes=2 * GB, memory=macos.on(mx.gpu), **options)
    assert made.budget_bytes == (int(0.9 * (6 << 30)) - 2 * GB - GB // 2 - GB) // 2
    assert str(made).endswith(
        "free memory 6.44 GB, reader pread: 24 GB with states and 1 GB spare exceed 0.9 of "
        "the available memory "
        f"{SEEN}, 5.8 GB; half of what is left"
    )
    asked = make_plan("10GB", blocks, trunk_bytes=2 * GB, memory=macos.on(mx.gpu), **options)
    assert asked.budget_bytes == 10 * GB

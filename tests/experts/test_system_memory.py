"""Oracle: files as Linux writes them and numbers as macOS gives them, with sums done by hand; for
what macOS leaves, a table of pages."""

from __future__ import annotations

import ctypes
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mlx_moeflux.experts import budget, system_memory
from mlx_moeflux.experts.system_memory import (
    LinuxPressure,
    MacPressure,
    available_memory,
    least_available,
    open_pressure,
    pressure_gap,
    sysctl,
    whole_memory,
)
from tests.experts.simulated_mac import GB, MACS, Pages, days, show, states

MEMINFO = "MemTotal: 8000 kB\nMemFree: 1 kB\nMemAvailable:    5000 kB\n"
STAT = "anon 77\ninactive_file 30000\nactive_file 4000\ntotal_inactive_file 8\n"


def psi(total: int) -> str:
    line = "avg10=0.00 avg60=0.00 avg300=0.00 total="
    return f"some {line}{total}\nfull {line}0\n"


@pytest.fixture
def files(monkeypatch):
    """Path -> text of the files that there are."""
    files = {"/proc/meminfo": MEMINFO}

    def read_text(path, **_):
        if str(path) not in files:
            raise FileNotFoundError(path)
        return files[str(path)]

    monkeypatch.setattr(Path, "read_text", read_text)
    monkeypatch.setattr(sys, "platform", "linux")
    sizes = {"SC_PHYS_PAGES": 2000, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(system_memory.os, "sysconf", sizes.__getitem__)
    return files


def test_a_limit_of_the_root_group_counts(files):
    assert available_memory() == (5_120_000, {})
    assert least_available() == 2000 * 4096 // 20
    files["/sys/fs/cgroup/memory.max"] = "4000000\n"
    files["/sys/fs/cgroup/memory.current"] = "1000000\n"
    assert available_memory() == (3_000_000, {})
    assert whole_memory() == 4_000_000
    files["/sys/fs/cgroup/memory.max"] = "max\n"
    assert available_memory() == (5_120_000, {})
    assert whole_memory() == 2000 * 4096
    files["/sys/fs/cgroup/memory/memory.limit_in_bytes"] = "2500000\n"
    files["/sys/fs/cgroup/memory/memory.usage_in_bytes"] = "500000\n"
    assert available_memory() == (2_000_000, {})


@pytest.mark.parametrize("inner", [True, False])
def test_the_least_of_nested_groups_counts(files, inner):
    files["/proc/self/cgroup"] = "1:name=systemd:/x\n0::/user.slice/run.scope\n"
    own, outer = "/sys/fs/cgroup/user.slice/run.scope", "/sys/fs/cgroup/user.slice"
    for folder, least in ((own, inner), (outer, not inner)):
        files[f"{folder}/memory.max"] = "3000000\n" if least else "4500000\n"
        files[f"{folder}/memory.current"] = "100000\n"
    assert available_memory() == (2_900_000, {})
    assert whole_memory() == 3_000_000


def test_pages_of_files_in_a_group_are_available(files):
    files["/proc/self/cgroup"] = "4:memory:/docker/1\n"
    folder = "/sys/fs/cgroup/memory"  # the container sees its own group as the root
    files[f"{folder}/memory.limit_in_bytes"] = "1000000\n"
    files[f"{folder}/memory.usage_in_bytes"] = "990000\n"
    files[f"{folder}/memory.stat"] = STAT
    assert available_memory() == (10_008, {})
    files["/proc/self/cgroup"] = "0::/\n"
    files["/sys/fs/cgroup/memory.max"] = "1000000\n"
    files["/sys/fs/cgroup/memory.current"] = "999000\n"
    files["/sys/fs/cgroup/memory.stat"] = STAT
    del files[f"{folder}/memory.limit_in_bytes"]
    assert available_memory() == (35_000, {})


def test_auto_plans_within_the_limit_of_a_group(files):
    files["/proc/self/cgroup"] = "0::/app\n"
    files["/sys/fs/cgroup/app/memory.max"] = "2000000\n"
    files["/sys/fs/cgroup/app/memory.current"] = "500000\n"
    memory = budget.measure_memory()
    if memory.backend != "cpu":
        pytest.skip("the GPU has its own memory")
    assert (memory.free_bytes, memory.usable_bytes) == (1_500_000, 900_000)


@pytest.mark.parametrize("whose", ["/proc/pressure/memory", "/sys/fs/cgroup/app/memory.pressure"])
def test_memory_is_scarce_where_tasks_wait_for_it_and_little_is_left(files, whose):
    now = [10.0]
    files["/proc/self/cgroup"] = "0::/app\n"
    files["/proc/pressure/memory"] = files["/sys/fs/cgroup/app/memory.pressure"] = psi(5_000_000)
    paths = open_pressure()._files
    assert list(map(str, paths)) == ["/proc/pressure/memory", "/sys/fs/cgroup/app/memory.pressure"]
    pressure = LinuxPressure(paths, clock=lambda: now[0])

    def after(seconds, waited):
        now[0] += seconds
        before = int(files[whose].split("total=")[1].split()[0])
        files[whose] = psi(before + waited)
        return pressure.scarce()

    files["/proc/meminfo"] = MEMINFO.replace("5000", "2000")
    assert not after(0.5, 0)
    assert not after(0.5, 49_000)
    assert after(0.5, 51_000)
    assert not after(0.5, 0)
    # What was waited long ago does not count.
    assert not after(600, 51_000)
    # Much is available: tasks wait for files that are read.
    files["/proc/meminfo"] = MEMINFO
    assert not after(0.5, 500_000)
    files["/sys/fs/cgroup/app/memory.max"] = "1000000\n"
    files["/sys/fs/cgroup/app/memory.current"] = "700000\n"
    assert after(0.5, 500_000)
    assert not pressure.scarce()  # no time has passed
    files["/sys/fs/cgroup/app/memory.current"] = "951000\n"
    assert after(0.5, 0)  # nobody waits, but hardly anything is left


def test_a_system_that_says_nothing(files):
    assert open_pressure() is None


def test_a_linux_that_does_not_say_what_is_available(files):
    files["/proc/meminfo"] = "MemTotal: 8000 kB\n"
    assumed = {"assumed, because /proc/meminfo has no MemAvailable": 2000 * 4096}
    assert available_memory() == (2000 * 4096, assumed)
    if budget.measure_memory().backend == "cpu":
        assert "no MemAvailable" in budget.measure_memory().what
    files["/sys/fs/cgroup/memory.max"], files["/sys/fs/cgroup/memory.current"] = "5000", "1000"
    assert available_memory() == (4000, assumed)


# ---- macOS


@pytest.mark.parametrize("text", [0.0, 0.15], ids=["no code", "much code"])
@pytest.mark.parametrize("state", ["idle", "busy", "file-heavy"])
@pytest.mark.parametrize("gib", MACS)
def test_what_a_mac_leaves_is_what_the_table_of_pages_leaves(monkeypatch, gib, state, text):
    pages = states(gib)[state]
    pages.text = min(text * pages.files, 600e6)
    show(monkeypatch, pages.vm_stat())
    found, parts = available_memory()
    assert found == sum(parts.values())
    assert abs(found / pages.to_be_had - 1) < 0.1
    assert found - pages.to_be_had < 300e6
    assert parts["assumed to be code of running programs"] < 0


@pytest.mark.parametrize("name", days())
def test_what_macs_in_daily_use_leave(monkeypatch, name):
    pages = days()[name]
    show(monkeypatch, pages.vm_stat())
    assert -0.1 < available_memory()[0] / pages.to_be_had - 1 <= 0


def test_files_count_whether_they_were_read_once_or_twice(monkeypatch):
    """A file that is read a second time has active pages, and those of programs turn inactive."""
    once = Pages(16 * GB, 3 * GB, 3.5 * GB, GB, 0.5 * GB, 4 * GB, 0.5 * GB)
    twice = Pages(16 * GB, 3 * GB, GB, 3.5 * GB, 4.5 * GB, 0, 0.5 * GB)
    found = []
    for pages in (once, twice):
        show(monkeypatch, pages.vm_stat())
        found.append(available_memory())
    assert found[0] == found[1]
    # Nothing of others: 3.5 GB free, 5 GB of files, less 8 %.
    assert found[0][0] == pytest.approx(0.92 * 8.5 * GB, abs=1e6)


@pytest.mark.parametrize("lacks", ["Pages purgeable", "File-backed pages"])
def test_without_one_of_the_counters_inactive_pages_count(monkeypatch, lacks):
    pages = states(16)["busy"]
    show(monkeypatch, pages.vm_stat().replace(lacks, "Pages of another kind"))
    found, parts = available_memory()
    purgeable = 0 if lacks == "Pages purgeable" else pages.purgeable
    expected = pages.free + pages.speculative + pages.inactive + purgeable
    assert found == pytest.approx(expected, abs=1e6)
    assumed = f'assumed, because vm_stat has no "{lacks}", of inactive pages'
    others = {"free"} if lacks == "Pages purgeable" else {"free", "purgeable"}
    assert set(parts) == {assumed, *others}


def test_a_system_that_does_not_answer_is_not_asked_for_a_minute(monkeypatch):
    asked = []

    def silent():
        asked.append(1)
        raise subprocess.TimeoutExpired("vm_stat", 2)

    monkeypatch.setattr(system_memory._Silent, "until", 0.0)
    show(monkeypatch, silent)
    for _ in range(3):
        assert set(available_memory()[1]) == {"assumed, because vm_stat gives no counters"}
    assert len(asked) == 1
    assert 0 < system_memory._Silent.until - time.monotonic() <= 60


def test_a_page_has_bytes(monkeypatch):
    show(monkeypatch, re.sub(r"page size of \d+", "page size of 0", states(16)["busy"].vm_stat()))
    assert set(available_memory()[1]) == {"assumed, because vm_stat gives no counters"}


@pytest.mark.parametrize(("level", "scarce"), [(1, False), (2, True), (4, True), (None, False)])
def test_the_level_of_macos_alone(monkeypatch, level, scarce):
    show(monkeypatch, None, level)
    assert (open_pressure() is None) == (level is None)
    assert MacPressure().scarce() == scarce
    assert pressure_gap().startswith(
        "neither" if level is None else "vm_stat gives too few counters"
    )


SMALL = Pages(16 * GB, 3 * GB, 4 * GB, 3 * GB, 0.5 * GB, 1.2 * GB, 0.1 * GB, 0, 4 * GB)


class Shown:
    """A Mac whose counters a test changes between two looks."""

    def __init__(self, monkeypatch, pages):
        self.now, self.level, self.compressed, self.swapped = 0.0, 1, 0.0, 0.0
        self.pages = pages
        show(
            monkeypatch,
            lambda: self.pages.vm_stat(self.compressed, self.swapped),
            lambda: self.level,
        )
        self.pressure = MacPressure(clock=lambda: self.now)

    def after(self, seconds, **changes):
        """Return whether memory is scarce a time later. compressed, swapped: More than before."""
        self.now += seconds
        for name in ("compressed", "swapped"):
            setattr(self, name, getattr(self, name) + changes.pop(name, 0))
        vars(self.pages).update(changes)
        return self.pressure.scarce()


def test_a_large_compressor_that_stays_is_calm(monkeypatch):
    mac = Shown(monkeypatch, Pages(*vars(SMALL).values()))
    assert not any(mac.after(0.5) for _ in range(20))
    # Some pages always come and go.
    assert not any(mac.after(0.5, compressed=10e6, compressor=4 * GB + 5e6 * i) for i in range(20))
    assert not mac.after(0.5, swapped=1e6)
    assert not mac.after(600, compressed=2 * GB, swapped=GB)  # long ago
    mac.level = 2
    assert mac.after(0.5)


@pytest.mark.parametrize(
    "growth",
    [
        {"compressor": 4.05 * GB, "file_inactive": 1.15 * GB},
        {"compressor": 4.03 * GB, "anonymous_active": 3.968 * GB},
        {"compressed": 60e6},  # and as much decompressed: nothing else moves
        {"swapped": 5e6},
    ],
    ids=lambda growth: next(iter(growth)),
)
def test_what_is_compressed_or_swapped_is_seen_before_the_level(monkeypatch, growth):
    mac = Shown(monkeypatch, Pages(*vars(SMALL).values()))
    assert not mac.after(0.5)
    assert mac.after(0.5, **growth)
    assert not mac.after(0.5)
    assert mac.pages.level == 1


def test_pages_that_are_compressed_for_files_are_no_shortage(monkeypatch):
    """A model that streams fills the page cache, and macOS compresses pages of idle programs."""
    mac = Shown(monkeypatch, Pages(*vars(SMALL).values()))
    moved = {"anonymous_inactive": 2.5 * GB, "file_active": 0.8 * GB, "compressor": 4.2 * GB}
    assert not mac.after(0.5, compressed=0.5 * GB, **moved)
    # Nor is it one where most of the memory can be had.
    mac = Shown(monkeypatch, states(64)["idle"])
    assert not mac.after(0.5, compressed=GB, compressor=0.4 * GB)
    assert mac.after(0.5, swapped=10e6)


def test_two_looks_at_once_have_no_endless_rate(monkeypatch):
    mac = Shown(monkeypatch, Pages(*vars(SMALL).values()))
    assert not mac.after(0, compressed=20e6)
    assert mac.after(0, compressed=30e6)


def test_what_macos_does_not_tell_is_said(monkeypatch):
    text = states(16)["idle"].vm_stat()
    show(monkeypatch, text)
    assert pressure_gap() is None
    show(monkeypatch, text, None)
    assert pressure_gap().endswith("vm_stat alone says when memory is scarce")
    assert not open_pressure().scarce()
    for answer in (None, "", "Pages free: many.\n", text.replace("page size of", "pages of")):
        show(monkeypatch, answer)
        assert pressure_gap().startswith("vm_stat gives too few counters: sysctl ")
        assert pressure_gap().endswith(" is scarce, and all memory counts as available")
        assert not open_pressure().scarce()
        found, parts = available_memory()
        assert parts == {"assumed, because vm_stat gives no counters": found}
    blind = "\n".join(
        row for row in text.splitlines() if "ompress" not in row and "Swap" not in row
    )
    show(monkeypatch, blind)
    assert pressure_gap().endswith(" alone says when memory is scarce")
    show(monkeypatch, blind, None)
    assert open_pressure() is None
    monkeypatch.setattr(sys, "platform", "linux")
    assert pressure_gap() is None


def test_a_number_of_sysctl_has_four_bytes(monkeypatch):
    """As in xnu: ``int sysctlbyname(const char *, void *, size_t *, void *, size_t)``."""

    class Library:
        def sysctlbyname(self, name, value, size, new, new_size):
            assert (new, new_size) == (None, 0)
            if name != b"kern.memorystatus_vm_pressure_level":
                return -1
            value._obj.value = 4
            assert size._obj.value == 4
            return 0

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library())
    assert sysctl("kern.memorystatus_vm_pressure_level") == 4
    assert sysctl("kern.unknown") is None
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert sysctl("kern.memorystatus_vm_pressure_level") is None

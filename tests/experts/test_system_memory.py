"""Oracle: files as Linux writes them and numbers as macOS gives them, with sums done by hand."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import pytest

from mlx_moeflux.experts import budget, system_memory
from mlx_moeflux.experts.system_memory import (
    LinuxPressure,
    MacPressure,
    about_available,
    available_memory,
    open_pressure,
    sysctl,
    whole_memory,
)

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


@pytest.mark.parametrize(("level", "scarce"), [(1, False), (2, True), (4, True), (None, False)])
def test_the_level_of_macos(monkeypatch, level, scarce):
    said = {"kern.memorystatus_vm_pressure_level": level, "kern.memorystatus_level": 40}
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(system_memory, "sysctl", said.__getitem__)
    monkeypatch.setattr(system_memory.os, "sysconf", lambda name: 100)
    assert (open_pressure() is None) == (level is None)
    assert MacPressure().scarce() == scarce
    assert about_available() == 4000


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

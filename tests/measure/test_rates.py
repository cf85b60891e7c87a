"""Oracle: the bandwidths of Apple's specifications, and what macOS prints, as substitutes."""

from __future__ import annotations

import subprocess
import sys
from datetime import date
from pathlib import Path
from types import SimpleNamespace

import pytest

from mlx_moeflux.measure import rates
from mlx_moeflux.measure.disk import DiskSpeed
from mlx_moeflux.measure.rates import CHIPS, find_rates, memory_bandwidth

HERE = Path()
ACCELERATOR = '+-o AGXAcceleratorG15X  <class AGXAcceleratorG15X>\n  "gpu-core-count" = {}\n'


@pytest.fixture
def mac(monkeypatch):
    """A Mac by its chip and GPU cores; its disk has 5.5 GB/s."""
    facts = SimpleNamespace(chip=b"Apple M3 Max\n", ioreg=ACCELERATOR.format(40).encode())

    def run(command, **options):
        assert options["timeout"] > 0
        found = {"/usr/sbin/sysctl": facts.chip, "/usr/sbin/ioreg": facts.ioreg}[command[0]]
        if found is None:
            raise subprocess.CalledProcessError(1, command)
        return SimpleNamespace(stdout=found)

    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(rates, "disk_speed", lambda place: DiskSpeed(5.5e9, date.today()))
    return facts


@pytest.mark.parametrize(("chip", "cores", "gbps"), [
    ("Apple M1", 8, 68.25), ("Apple M2", 10, 100), ("Apple M3 Pro", 18, 150),
    ("Apple M3 Max", 30, 300), ("Apple M3 Max", 40, 400), ("Apple M3 Max", 0, 300),
    ("Apple M4 Max", 32, 410), ("Apple M4 Max", 40, 546), ("Apple M5 Max", 40, 614),
    ("Apple M3 Ultra", 80, 819), ("Apple M5 Ultra", 80, 1200), ("Apple M5 Ultra", 64, None),
    ("Apple M9", 99, None), ("Intel(R) Core(TM) i9", 0, None), ("", 0, None),
])  # fmt: skip
def test_bandwidths_of_chips(chip, cores, gbps):
    assert memory_bandwidth(chip, cores) == gbps


def test_the_table_ascends():
    for rows in CHIPS.values():
        assert list(rows) == sorted(rows)
        assert [gbps for _, gbps in rows] == sorted({gbps for _, gbps in rows})


def test_a_mac_is_known_by_its_chip_and_cores(mac):
    found = find_rates(HERE)
    assert found == (400, "Apple M3 Max", 5.5, "measured today")
    assert str(found) == "memory 400 GB/s (Apple M3 Max), disk 5.5 GB/s (measured today)"
    for ioreg in (ACCELERATOR.format(30).encode(), b"\xff nothing", None):
        mac.ioreg = ioreg
        assert find_rates(HERE).memory_gbps == 300
    assert find_rates(HERE).memory_source == "Apple M3 Max, assumed to have fewer than 40 GPU cores"
    mac.chip = b"Apple M9 Max\n"
    assert find_rates(HERE)[:2] == (100, "assumed, Apple M9 Max is unknown")
    for unknown in (None, b"no\nname", b"\xff\x00", b"x" * 100):
        mac.chip = unknown
        assert find_rates(HERE)[:2] == (100, "assumed, the chip is unknown")


def test_given_numbers_win_and_nothing_is_measured(mac, monkeypatch):
    monkeypatch.setattr(rates, "disk_speed", None)
    assert find_rates(HERE, memory_gbps=1, ssd_gbps=2) == (1, "given", 2, "given")


def test_the_disk_is_measured_anew_if_one_asks(mac, monkeypatch):
    now = DiskSpeed(3e9, date.today(), 8 * 10**9, busy=True)
    monkeypatch.setattr(rates, "measure_disk", lambda place: now)
    assert find_rates(HERE).ssd_gbps == 5.5
    assert find_rates(HERE, measure_anew=True)[2:] == (3.0, str(now))
    assert "measured today, 8.0 GB of memory free, machine busy" in str(now)


def test_a_disk_that_cannot_be_measured_is_assumed(mac, monkeypatch):
    monkeypatch.setattr(rates, "disk_speed", lambda place: None)
    assert find_rates(HERE)[2:] == (3.0, "assumed, not measurable")


def test_elsewhere_the_memory_is_assumed(mac, monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    assert find_rates(HERE)[:2] == (100, "assumed, the chip is unknown")

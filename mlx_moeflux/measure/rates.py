"""The bandwidths of this machine: of its memory by the name of the chip, of its disk measured."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from mlx_moeflux.measure.disk import disk_speed, measure_disk
from mlx_moeflux.measure.plan import MEMORY_GBPS, SSD_GBPS, short

# Chip -> (GPU cores, GB/s of its memory), the fewest cores first: a chip with more of them has the
# next row's memory. Apple's technical specifications of the Macs with each chip, and for M5 Ultra
# and M6 its newsroom of August 2026, which gives the largest M5 Ultra alone.
CHIPS: dict[str, tuple[tuple[int, float], ...]] = {
    "Apple M1": ((0, 68.25),),
    "Apple M1 Pro": ((0, 200),),
    "Apple M1 Max": ((0, 400),),
    "Apple M1 Ultra": ((0, 800),),
    "Apple M2": ((0, 100),),
    "Apple M2 Pro": ((0, 200),),
    "Apple M2 Max": ((0, 400),),
    "Apple M2 Ultra": ((0, 800),),
    "Apple M3": ((0, 100),),
    "Apple M3 Pro": ((0, 150),),
    "Apple M3 Max": ((0, 300), (40, 400)),
    "Apple M3 Ultra": ((0, 819),),
    "Apple M4": ((0, 120),),
    "Apple M4 Pro": ((0, 273),),
    "Apple M4 Max": ((0, 410), (40, 546)),
    "Apple M5": ((0, 153),),
    "Apple M5 Pro": ((0, 307),),
    "Apple M5 Max": ((0, 460), (40, 614)),
    "Apple M5 Ultra": ((80, 1200),),
    "Apple M6": ((0, 170),),
}


class Rates(NamedTuple):
    """Bandwidths in GB/s, and in a few words where each is from."""

    memory_gbps: float
    memory_source: str
    ssd_gbps: float
    ssd_source: str

    def __str__(self) -> str:
        return (
            f"memory {self.memory_gbps:.4g} GB/s ({self.memory_source}), "
            f"disk {short(self.ssd_gbps)} GB/s ({self.ssd_source})"
        )


def find_rates(
    place: Path,
    *,
    memory_gbps: float | None = None,
    ssd_gbps: float | None = None,
    measure_anew: bool = False,
) -> Rates:
    """Return the bandwidths of this machine's memory, and of the disk that `place` is on.

    The memory's is that of the chip, or an assumption. The disk's is measured, which takes up to 10
    seconds, and kept for 30 days, see :func:`~mlx_moeflux.measure.disk.disk_speed`. A number that
    is given wins. measure_anew: Measure the disk although a speed is kept.
    """
    memory = (memory_gbps, "given") if memory_gbps is not None else _memory()
    disk = (ssd_gbps, "given") if ssd_gbps is not None else _disk(place, measure_anew)
    return Rates(*memory, *disk)


def _memory() -> tuple[float, str]:
    name = chip()
    cores = gpu_cores() if name in CHIPS else 0
    found = memory_bandwidth(name, cores)
    if found is None:
        return MEMORY_GBPS, f"assumed, {name or 'the chip'} is unknown"
    if not cores and len(CHIPS[name]) > 1:
        name += f", assumed to have fewer than {CHIPS[name][-1][0]} GPU cores"
    return found, name


def _disk(place: Path, anew: bool) -> tuple[float, str]:
    found = measure_disk(place) if anew else disk_speed(place)
    if found is None:
        return SSD_GBPS, "assumed, not measurable"
    return found.bytes_per_second / 1e9, str(found)


def chip_bandwidth() -> float | None:
    """Return the GB/s of this machine's memory; None: unknown."""
    name = chip()
    return memory_bandwidth(name, gpu_cores()) if name in CHIPS else None


def memory_bandwidth(name: str, cores: int) -> float | None:
    """Return the GB/s of a chip's memory; None: unknown. cores: Of its GPU, 0 if unknown."""
    return next((gbps for least, gbps in reversed(CHIPS.get(name, ())) if cores >= least), None)


def chip() -> str:
    """Return the name of a Mac's chip, such as ``Apple M3 Max``; empty: unknown."""
    if sys.platform != "darwin":
        return ""
    name = _output("/usr/sbin/sysctl", "-n", "machdep.cpu.brand_string").strip()
    return name if re.fullmatch(r"[ -~]{1,60}", name) else ""


def gpu_cores() -> int:
    """Return the number of cores of a Mac's GPU; 0: unknown."""
    if sys.platform != "darwin":
        return 0
    listed = _output("/usr/sbin/ioreg", "-rc", "AGXAccelerator", "-d1")
    found = re.search(r'"gpu-core-count" = (\d{1,4})\b', listed)
    return int(found[1]) if found else 0


def _output(*command: str) -> str:
    """Return what a command of the system prints; empty: it failed, or does not answer."""
    try:
        done = subprocess.run(command, capture_output=True, timeout=2, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.decode("utf-8", "replace")

"""A Mac's memory as a table of pages, and the counters that xnu computes from it.

xnu: "Pages free" excludes speculative pages; active, inactive and speculative pages are those of
files and the anonymous ones; purgeable pages are anonymous; those of the compressor are apart.
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from mlx_moeflux.experts import system_memory

PAGE, GB, GIB = 16384, 10**9, 1 << 30
MACS = (8, 16, 64)  # GiB
# The share of a page that the compressor keeps.
COMPRESSED = 0.4
# The share of the memory that stays with files while programs want more.
FILES_LEFT = 0.04


@dataclass
class Pages:
    """Bytes of each kind; what is left of `total` is free. purgeable: Of the anonymous inactive
    ones. text: Of the active ones of files, code of running programs."""

    total: float
    wired: float
    anonymous_active: float
    anonymous_inactive: float
    file_active: float
    file_inactive: float
    speculative: float
    purgeable: float = 0.0
    compressor: float = 0.0
    text: float = 0.0

    @property
    def active(self) -> float:
        return self.anonymous_active + self.file_active

    @property
    def inactive(self) -> float:
        return self.anonymous_inactive + self.file_inactive

    @property
    def files(self) -> float:
        return self.file_active + self.file_inactive + self.speculative

    @property
    def free(self) -> float:
        used = self.wired + self.active + self.inactive + self.speculative + self.compressor
        assert used <= self.total
        return self.total - used

    @property
    def to_be_had(self) -> float:
        """Free, of files or purgeable, and no code of a running program."""
        return self.free + self.files + self.purgeable - self.text

    @property
    def level(self) -> int:
        """kern.memorystatus_vm_pressure_level: a warning once the compressor holds more than half
        of what is not wired."""
        rest = self.active + self.inactive + self.free + self.speculative
        return 2 if self.compressor > rest else 1

    def vm_stat(self, compressions: float = 0, swapouts: float = 0) -> str:
        """Return the text that the command prints."""
        rows = {
            "Pages free": self.free,
            "Pages active": self.active,
            "Pages inactive": self.inactive,
            "Pages speculative": self.speculative,
            "Pages throttled": 0,
            "Pages wired down": self.wired,
            "Pages purgeable": self.purgeable,
            '"Translation faults"': GB,
            "Pages copy-on-write": GB,
            "File-backed pages": self.files,
            "Anonymous pages": self.anonymous_active + self.anonymous_inactive,
            "Pages stored in compressor": self.compressor / COMPRESSED,
            "Pages occupied by compressor": self.compressor,
            "Decompressions": 0,
            "Compressions": compressions,
            "Pageins": GB,
            "Swapins": 0,
            "Swapouts": swapouts,
        }
        lines = [f"{name + ':':<32}{int(count) // PAGE}." for name, count in rows.items()]
        head = f"Mach Virtual Memory Statistics: (page size of {PAGE} bytes)"
        return "\n".join([head, *lines]) + "\n"


def show(monkeypatch: Any, text: Any, level: Any = 1) -> None:
    """Let this process see macOS. text: What ``vm_stat`` prints; None: it is absent. level: What
    sysctl says. Either may be a function."""

    def run(command, **_):
        assert command == ["/usr/bin/vm_stat"]
        found = text() if callable(text) else text
        if found is None:
            raise FileNotFoundError(command[0])
        return SimpleNamespace(stdout=found.encode())

    def number(name):
        assert name == system_memory.MACOS_LEVEL
        return level() if callable(level) else level

    process = SimpleNamespace(
        run=run,
        SubprocessError=subprocess.SubprocessError,
        TimeoutExpired=subprocess.TimeoutExpired,
    )
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(system_memory, "subprocess", process)
    monkeypatch.setattr(system_memory, "sysctl", number)
    monkeypatch.setattr(system_memory, "_machine_bytes", lambda: 512 * GIB)


def states(gib: int) -> dict[str, Pages]:
    """A Mac of so much memory: idle, in use by other programs, and after large files were read."""
    total = gib * GIB
    shares = {
        #        wired  anonymous     file: active, inactive, speculative, purgeable, compressor
        "idle": (0.15, 0.14, 0.06, 0.12, 0.10, 0.03, 0.01, 0.0),
        "busy": (0.20, 0.27, 0.22, 0.05, 0.06, 0.01, 0.005, 0.14),
        "file-heavy": (0.16, 0.12, 0.13, 0.34, 0.12, 0.04, 0.01, 0.06),
    }
    return {name: Pages(total, *(share * total for share in row)) for name, row in shares.items()}


def days() -> dict[str, Pages]:
    """Macs in daily use, in GB, by somebody who did not see how memory is counted."""
    rows = {
        #   GiB, wired, anonymous, file: active, inactive, speculative, purgeable, compressor
        "8, after boot": (8, 1.6, 1.1, 0.9, 1.2, 1.5, 0.3, 0.05, 0.0),
        "8, browser with 60 tabs": (8, 1.9, 1.5, 1.4, 0.5, 0.6, 0.05, 0.1, 2.1),
        "8, index of sources": (8, 2.1, 1.2, 1.1, 0.9, 1.6, 0.2, 0.02, 1.2),
        "16, video call": (16, 2.9, 3.6, 3.3, 1.1, 1.2, 0.15, 0.3, 3.0),
        "16, model read twice": (16, 2.6, 1.9, 1.2, 7.4, 2.4, 0.5, 0.1, 0.4),
        "16, game": (16, 5.5, 3.1, 2.2, 1.4, 1.3, 0.1, 0.05, 2.2),
        "64, virtual machine": (64, 36.5, 6.0, 4.0, 5.0, 8.0, 1.0, 0.5, 3.0),
        "64, backup": (64, 4.2, 7.5, 5.5, 12.0, 31.0, 3.0, 0.8, 0.5),
        "64, after boot": (64, 3.4, 4.0, 2.0, 1.5, 2.0, 0.8, 0.2, 0.0),
    }
    return {name: Pages(gib * GIB, *(GB * n for n in row)) for name, (gib, *row) in rows.items()}


@dataclass
class Machine:
    """A Mac on which programs and a bank of experts want memory, settled by :meth:`after`.

    programs: Bytes that they use, in the compressor or not. bank: Bytes of the banks, in use.
    Programs take free pages first, then those of files, then macOS compresses them.
    """

    total: float
    wired: float
    programs: float
    bank: float
    stored: float = 0.0
    compressions: float = 0.0
    now: float = field(default=0.0)

    @property
    def pages(self) -> Pages:
        """The table at the moment; files take what programs leave but for 1 % of the memory."""
        anonymous = self.programs - self.stored + self.bank
        compressor = COMPRESSED * self.stored
        left = self.total - self.wired - anonymous - compressor
        files = max(left - 0.01 * self.total, 0.0)
        active, inactive, speculative = 0.7 * files, 0.28 * files, 0.02 * files
        half = anonymous / 2
        return Pages(
            self.total, self.wired, half, half, active, inactive, speculative, 0, compressor
        )

    def after(self, seconds: float, **changes: float) -> None:
        """Let time pass: pages are compressed where too few are left to files, and 20 MB a second
        are decompressed again where there are enough. The pages of a program that ends vanish from
        the compressor by its share."""
        self.now += seconds
        if (programs := changes.get("programs", self.programs)) < self.programs:
            self.stored *= programs / self.programs
        vars(self).update(changes)
        left = self.total - self.wired - self.bank - self.programs + (1 - COMPRESSED) * self.stored
        lacks = FILES_LEFT * self.total - left
        if lacks > 0:
            more = lacks / (1 - COMPRESSED)
            self.stored, self.compressions = self.stored + more, self.compressions + more
        elif lacks < -GB:
            self.stored = max(self.stored - 20e6 * seconds, 0.0)
        assert self.stored <= self.programs

    def shown(self, monkeypatch: Any) -> None:
        """Let this process see it."""
        show(monkeypatch, lambda: self.pages.vm_stat(self.compressions), lambda: self.pages.level)

"""macOS's Python on Linux, see :mod:`tests.kernels.metal.macos.macos_python`."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

import mlx_moeflux
from tests.kernels.metal.mac import environment
from tests.kernels.metal.macos.macos_python import MISSING

PACKAGE = Path(mlx_moeflux.__file__).parent
# File -> names of MISSING that it uses where they are there, and does without elsewhere.
GUARDED = {
    "checkpoint/formats/packed.py": {"posix_fallocate"},
    "experts/io/file_readers.py": {"posix_fadvise", "POSIX_FADV_WILLNEED"},
    "experts/io/open_files.py": {"posix_fadvise", "POSIX_FADV_RANDOM"},
    "measure/benchmark/pages.py": {"fdatasync", "posix_fadvise", "POSIX_FADV_DONTNEED"},
}
SEEN = """
import ctypes, json, os, platform, resource, select, subprocess, sys, urllib.request
level, size = ctypes.c_int32(), ctypes.c_size_t(4)
call = ctypes.CDLL(None).sysctlbyname
failed = call(b"kern.memorystatus_level", ctypes.byref(level), ctypes.byref(size), None, 0)
def output(*command):
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
child = "import sys; print(sys.platform)"
print(json.dumps({
    "system": [sys.platform, platform.system(), platform.machine(), platform.mac_ver()[0]],
    "there": [hasattr(os, "posix_fadvise"), hasattr(os, "posix_spawn"), hasattr(select, "epoll")],
    "proc": [os.path.exists("/proc/self"), os.access("/sys", os.R_OK)],
    "level": [failed, level.value, output("/usr/sbin/sysctl", "-n", "kern.memorystatus_level")],
    "unknown": call(b"no.such", None, ctypes.byref(size), None, 0),
    "vm_stat": output("vm_stat"),
    "child": output(sys.executable, "-P", "-c", child),
    "pages": [os.sysconf("SC_PAGE_SIZE"), os.sysconf("SC_PHYS_PAGES")],
}))
try: open("/proc/self/status")
except FileNotFoundError: sys.exit(0)
sys.exit(1)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="macOS's Python is there")
def test_a_process_and_its_children_are_macos():
    done = subprocess.run(
        [sys.executable, "-c", SEEN], env=environment(), capture_output=True, text=True, check=True
    )
    seen = json.loads(done.stdout)
    assert seen["system"] == ["darwin", "Darwin", "arm64", "26.1"]
    assert seen["there"] == [False, True, False]
    assert seen["proc"] == [False, False]
    assert seen["level"] == [0, 62, "62\n"]
    assert seen["unknown"] == -1
    assert seen["child"] == "darwin\n"
    assert seen["pages"] == [16384, (8 << 30) // 16384]
    head, *lines = seen["vm_stat"].splitlines()
    assert head == "Mach Virtual Memory Statistics: (page size of 16384 bytes)"
    names = [line.partition(":")[0].strip('"') for line in lines]
    assert len(names) == 22
    assert {"Pages free", "File-backed pages", "Anonymous pages", "Swapouts"} <= set(names)
    assert all(line.endswith(".") for line in lines)


def used(file: Path) -> set[str]:
    """Return the names of MISSING that a file has as attributes of their modules."""
    missing = {module.__name__: beginnings for module, beginnings in MISSING.items()}
    return {
        node.attr
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.attr.startswith(missing.get(node.value.id, ("\0",)))
    }


def test_names_that_macos_lacks_are_those_that_are_guarded():
    found = {str(f.relative_to(PACKAGE)): used(f) for f in PACKAGE.rglob("*.py")}
    assert {file: names for file, names in found.items() if names} == GUARDED

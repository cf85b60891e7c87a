"""Verdicts on variants of kernels, kept for a GPU, a version of MLX and a build of macOS.

Metal's compiler is a part of macOS, so another build asks again. A trial that is running has a file
of its own: one whose process died twice in it is a bad one, and is not begun a third time.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import plistlib
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlx_moeflux import user_cache

# Of macOS.
SYSTEM_VERSION = Path("/System/Library/CoreServices/SystemVersion.plist")
DEATHS = 2
# How long a process waits for others that keep verdicts, which takes them some milliseconds.
LOCK_SECONDS = 5.0


@dataclass(frozen=True)
class Verdict:
    """The result of a trial.

    error: Root mean square by that of the truth, None without numbers. reason: Why it failed.
    launched: Names of the kernels.
    """

    ok: bool
    error: float | None = None
    reason: str = ""
    launched: str = ""


@dataclass
class _Known:
    """Verdicts of this process. read: True if those of the files are among them."""

    verdicts: dict[str, Verdict] = field(default_factory=dict)
    read: bool = False


_known = _Known()


def get(key: str) -> Verdict | None:
    """Return the verdict on a variant, of this process or an earlier one."""
    if not _known.read:
        _known.read = True
        _count_deaths()
        for name, entry in _entries(_read()).items():
            if (verdict := _verdict(entry)) is not None:
                _known.verdicts.setdefault(name, verdict)
    return _known.verdicts.get(key)


def put(key: str, verdict: Verdict) -> None:
    """Keep a verdict, for other processes too; if the file cannot be written, they try again."""
    _known.verdicts[key] = verdict
    _update(key, lambda before: asdict(verdict))


def refused() -> list[str]:
    """Return the variants that failed their trials here, for the identity of saved states."""
    get("")
    return sorted(key for key, verdict in _known.verdicts.items() if not verdict.ok)


def forget() -> None:
    """Know nothing but the files, as a new process."""
    _known.verdicts.clear()
    _known.read = False


def _verdict(entry: dict[str, Any]) -> Verdict | None:
    if entry.get("deaths", 0) >= DEATHS:
        return Verdict(False, reason="its trial ended the process twice")
    try:
        return Verdict(**{n: entry[n] for n in ("ok", "error", "reason", "launched")})
    except KeyError:
        return None


# ---- Places


def gpu() -> str:
    """Return the device's name."""
    return str(mx.device_info().get("device_name", "unknown GPU"))


def place() -> str:
    """Return the place for which a verdict holds."""
    version, build = mx.__version__, _macos_build()  # pyright: ignore[reportAttributeAccessIssue]
    return f"MLX {version} on {gpu()}" + (f", macOS {build}" if build else "")


@functools.cache
def _macos_build() -> str:
    """Return the build, such as 24G90; empty elsewhere."""
    try:
        return str(plistlib.loads(SYSTEM_VERSION.read_bytes())["ProductBuildVersion"])
    except (OSError, ValueError, KeyError):
        return ""


# ---- Files


def file() -> Path:
    """Return the file of verdicts."""
    return user_cache.root() / "trials.json"


def _read() -> dict[str, Any]:
    try:
        content = json.loads(file().read_text())
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def _entries(content: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of this place."""
    found = content.get(place())
    found = found if isinstance(found, dict) else {}
    return {key: entry for key, entry in found.items() if isinstance(entry, dict)}


def _update(key: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Replace an entry of this place by what `change` makes of it; no other process's is lost."""
    with _locked():
        content = _read()
        entries = _entries(content)
        content[place()] = entries | {key: change(entries.get(key, {}))}
        _write(file(), content)


@contextlib.contextmanager
def _locked() -> Iterator[None]:
    """Keep other processes from the file; where nothing can be locked, do not."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            file().parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = stack.enter_context(file().with_suffix(".lock").open("a"))
            until = time.monotonic() + LOCK_SECONDS
            while not _lock(lock.fileno()) and time.monotonic() < until:
                time.sleep(0.005)
        yield


def _lock(descriptor: int) -> bool:
    """Lock an open file until it is closed; return False where another process has."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False


def _write(path: Path, content: Any) -> None:
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        user_cache.write(path, json.dumps(content, indent=1).encode())


@contextlib.contextmanager
def running(key: str) -> Iterator[None]:
    """Keep a file for the time of a trial, which names its process."""
    mine = user_cache.root() / f"trial-{os.getpid()}.json"
    _write(mine, {"key": key, "place": place(), "process": os.getpid(), "started": _own_start()})
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            mine.unlink()


def _count_deaths() -> None:
    """Count the trials whose process is gone, and delete their files."""
    for path in user_cache.root().glob("trial-*.json"):
        try:
            left = json.loads(path.read_text())
            key, process, started = left["key"], int(left["process"]), left["started"]
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if _start(process) == started:
            continue
        try:
            path.unlink()
        except OSError:
            continue  # another process counts it
        if left.get("place") == place():
            _update(key, lambda before: {"deaths": before.get("deaths", 0) + 1})


@functools.cache
def _own_start() -> str:
    return _start(os.getpid())


def _start(process: int) -> str:
    """Return when a process began, in the words of ``ps``; empty if there is none."""
    try:
        os.kill(process, 0)
    except (ProcessLookupError, OverflowError):
        return ""
    except OSError:
        pass  # somebody else's
    try:
        command = ["ps", "-o", "lstart=", "-p", str(process)]
        listed = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
        return listed.stdout.strip() or "unknown"
    except (OSError, subprocess.SubprocessError):
        return "unknown"

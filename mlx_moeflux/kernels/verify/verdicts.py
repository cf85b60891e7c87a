"""Verdicts on variants of kernels, kept for a GPU, a version of MLX and a build of macOS; and, for
sizes of calls, whether stock MLX was faster.

Metal's compiler is a part of macOS, so another build asks again. A trial that is running has a file
of its own: one whose process died twice in it is a bad one, and is not begun a third time. Of what
was timed the first process that keeps a choice decides for all.
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


@dataclass(frozen=True)
class Choice:
    """The faster of two right ways to compute calls of a size: an implementation or stock MLX.

    stock: True for stock MLX. us: Microseconds of a call by name, if they were measured. reason:
    Why the table of kernels stands without a measurement.
    """

    stock: bool
    us: dict[str, float] = field(default_factory=dict)
    reason: str = ""


@dataclass
class _Known:
    """Verdicts and choices of this process. read: True if those of the files are among them."""

    verdicts: dict[str, Verdict] = field(default_factory=dict)
    choices: dict[str, Choice] = field(default_factory=dict)
    read: bool = False


_known = _Known()


def get(key: str) -> Verdict | None:
    """Return the verdict on a variant, of this process or an earlier one."""
    _read_once()
    return _known.verdicts.get(key)


def choice(key: str) -> Choice | None:
    """Return the choice for calls of a size, of this process or an earlier one."""
    _read_once()
    return _known.choices.get(key)


def _read_once() -> None:
    if _known.read:
        return
    _known.read = True
    _count_deaths()
    for name, entry in _entries(_read()).items():
        if (verdict := _verdict(entry)) is not None:
            _known.verdicts.setdefault(name, verdict)
        if (chosen := _choice(entry)) is not None:
            _known.choices.setdefault(name, chosen)


def put(key: str, verdict: Verdict) -> None:
    """Keep a verdict, for other processes too; if the file cannot be written, they try again."""
    _known.verdicts[key] = verdict
    _update(key, lambda before: asdict(verdict))


def choose(key: str, chosen: Choice) -> Choice:
    """Keep a choice for this process and later ones, and return what holds: that of another process
    that was earlier, and no stock MLX where it cannot be kept."""
    with _locked() as alone:
        content = _read()
        entries = _entries(content)
        if (earlier := _choice(entries.get(key, {}))) is not None:
            chosen = earlier
        else:
            content[place()] = entries | {key: asdict(chosen)}
            if not (alone and _write(file(), content)):
                chosen = Choice(False, chosen.us, "the choice cannot be kept")
    _known.choices[key] = chosen
    return chosen


def leave(key: str, reason: str) -> Choice:
    """Take the table of kernels for calls of a size in this process alone, and return that choice.
    Later processes may measure."""
    _known.choices[key] = chosen = Choice(False, reason=reason)
    return chosen


def can_keep() -> bool:
    """Return True if the file of verdicts can be written."""
    folder = file().parent
    with contextlib.suppress(OSError):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return os.access(folder, os.W_OK | os.X_OK)


def refused() -> list[str]:
    """Return the variants that failed their trials here, for the identity of saved states."""
    _read_once()
    return sorted(key for key, verdict in _known.verdicts.items() if not verdict.ok)


def stock_choices() -> list[str]:
    """Return the sizes of calls for which stock MLX was faster here, for the identity of saved
    states."""
    _read_once()
    return sorted(key for key, chosen in _known.choices.items() if chosen.stock)


def forget() -> None:
    """Know nothing but the files, as a new process."""
    _known.verdicts.clear()
    _known.choices.clear()
    _known.read = False


def _verdict(entry: dict[str, Any]) -> Verdict | None:
    if entry.get("deaths", 0) >= DEATHS:
        return Verdict(False, reason="its trial ended the process twice")
    try:
        return Verdict(**{n: entry[n] for n in ("ok", "error", "reason", "launched")})
    except KeyError:
        return None


def _choice(entry: dict[str, Any]) -> Choice | None:
    try:
        return Choice(**{n: entry[n] for n in ("stock", "us", "reason")})
    except KeyError:
        return None


# ---- Places


def gpu() -> str:
    """Return the device's name."""
    return str(mx.device_info().get("device_name", "unknown GPU"))


def is_virtual() -> bool:
    """Return True if the GPU is one of a virtual machine on macOS: others share what it is."""
    return "paravirtual" in gpu().lower()


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
def _locked() -> Iterator[bool]:
    """Keep other processes from the file; where nothing can be locked, do not, and give False."""
    with contextlib.ExitStack() as stack:
        alone = False
        with contextlib.suppress(OSError):
            file().parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = stack.enter_context(file().with_suffix(".lock").open("a"))
            until = time.monotonic() + LOCK_SECONDS
            while not (alone := _lock(lock.fileno())) and time.monotonic() < until:
                time.sleep(0.005)
        yield alone


def _lock(descriptor: int) -> bool:
    """Lock an open file until it is closed; return False where another process has."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False


def _write(path: Path, content: Any) -> bool:
    """Write a file and return True; return False where none can be written."""
    with contextlib.suppress(OSError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        user_cache.write(path, json.dumps(content, indent=1).encode())
        return True
    return False


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

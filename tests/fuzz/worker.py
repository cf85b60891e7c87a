"""A bounded process that handles cases; and the parent's side, which replaces it when it dies."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

# The longest prompt of all cases takes 8 s on a busy machine.
HANG_SECONDS = 30.0
MEMORY_BYTES = 1 << 30
GOOD = ("ok", "line")


class Worker:
    """Runs cases in a process of its own. Use as a context manager."""

    def __init__(self, folder: Path):
        self._folder, self._process = folder, None

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def run(self, subject: str, ops: Any) -> tuple[str, str]:
        """Return the class of an outcome (ok, line, traceback, changed, hang, crash, memory) and
        its text."""
        if self._process is None:
            root = Path(__file__).parents[2]
            env = {**os.environ, "HF_HUB_OFFLINE": "1", "MOEFLUX_CACHE_DIR": str(self._folder)}
            env["PYTHONPATH"] = os.pathsep.join([str(root), env.get("PYTHONPATH", "")])
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.fuzz.worker", str(self._folder)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                bufsize=0, env=env,
            )  # fmt: skip
        process = self._process
        process.stdin.write(json.dumps([subject, ops]).encode() + b"\n")
        # A subject is made at its first case.
        if self._line(120) is None:
            return self._died(120)
        reply = self._line(HANG_SECONDS)
        if reply is None:
            return self._died(HANG_SECONDS)
        return tuple(json.loads(reply))

    def stop(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            with self._process:
                pass
            self._process = None

    def _line(self, seconds: float) -> bytes | None:
        fd, line, until = self._process.stdout.fileno(), b"", time.monotonic() + seconds
        while not line.endswith(b"\n"):
            left = until - time.monotonic()
            if left <= 0 or not select.select([fd], [], [], left)[0]:
                return None
            byte = os.read(fd, 1)
            if not byte:
                return None
            line += byte
        return line

    def _died(self, seconds: float) -> tuple[str, str]:
        try:
            status = self._process.wait(1)
            outcome = "crash", f"status {status}"
        except subprocess.TimeoutExpired:
            outcome = "hang", f"more than {seconds:g} s"
        self.stop()
        return outcome


# ---- The process


def outcome_of(use: Any, folder: Path) -> tuple[str, str]:
    """Return what became of one case."""
    from mlx_moeflux.errors import MoefluxError

    try:
        wrong = use(folder)
    except MoefluxError as error:
        text = str(error)
        return ("traceback" if "\n" in text or len(text) > 900 else "line"), text
    except MemoryError:
        return "memory", traceback.format_exc()[-1500:]
    except BaseException:  # noqa: BLE001
        text = traceback.format_exc()[-1500:]
        short = "Unable to allocate" in text or "bad_alloc" in text
        return ("memory" if short else "traceback"), text
    return ("changed", wrong) if wrong else ("ok", "")


def _pages() -> int:
    """Return the bytes of this process's address space."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def _serve(home: Path) -> None:
    import resource

    from tests.fuzz.subjects import SUBJECTS, prepare

    # Cases that read or write the standard streams get neither requests nor replies.
    requests, replies = os.dup(0), os.dup(1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    prepare()
    made: dict[str, Any] = {}
    bounded = Path("/proc/self/statm").exists()
    with tempfile.TemporaryDirectory(dir=home) as base, os.fdopen(replies, "w") as out:
        for line in os.fdopen(requests):
            name, ops = json.loads(line)
            if name not in made:
                made[name] = SUBJECTS[name](Path(base) / name)
            print("made", file=out, flush=True)
            with tempfile.TemporaryDirectory(dir=base) as folder:
                if bounded:
                    resource.setrlimit(resource.RLIMIT_AS, (_pages() + MEMORY_BYTES, -1))
                try:
                    made[name].make(Path(folder), ops)
                    outcome = outcome_of(made[name].use, Path(folder))
                finally:
                    resource.setrlimit(resource.RLIMIT_AS, (-1, -1))
                print(json.dumps(outcome), file=out, flush=True)


if __name__ == "__main__":
    _serve(Path(sys.argv[1]))

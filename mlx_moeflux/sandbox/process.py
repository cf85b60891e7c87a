"""The child processes, and their bounds of time, memory and output.

One renders templates, the other builds and runs tokenizers. Each starts at the first request, takes
one request at a time, and ends with this process. A request that breaks a bound ends it; the next
request starts another.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import marshal
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from time import monotonic
from typing import Any

WORKER = "mlx_moeflux.sandbox.worker"
# Processor time of a request; the time on the clock may be twice as long.
SECONDS = 4.0
# Address space, the interpreter and its libraries included. macOS does not bound it: there, and
# everywhere, this process looks at the child's size meanwhile, and ends it.
MEMORY_BYTES = 768 << 20
WATCH_SECONDS = 0.005
REPLY_BYTES = 32 << 20
START_SECONDS = 60.0
# Of the length of a request without its content, which come before it.
HEAD_BYTES = 8


class Refused(Exception):
    """The template or tokenizer raised an error; the text is its message."""


class Broken(Exception):
    """The request broke a bound, or ended the process; the text says which."""


class Child:
    """A process that runs :mod:`~mlx_moeflux.sandbox.worker`. Any thread may call it.

    reply_bytes: Of the longest reply.
    """

    def __init__(self, *, reply_bytes: int = REPLY_BYTES):
        self._lock, self._reply_bytes = threading.Lock(), reply_bytes
        self._process: subprocess.Popen[bytes] | None = None

    def call(
        self,
        job: str,
        given: Mapping[str, Any],
        content: bytes = b"",
        *,
        seconds: float = SECONDS,
        memory_bytes: int = MEMORY_BYTES,
        reply_bytes: int | None = None,
    ) -> Any:
        """Return the value of a job of the worker.

        given: Plain values. content: Bytes that the job takes besides. reply_bytes: Of the longest
        reply, instead of the child's usual one.

        Raises:
            Refused, Broken: The job failed. ValueError: `given` has values of other classes, or is
            nested too deep.
        """
        head = {"job": job, "given": given, "bytes": len(content)}
        most = self._reply_bytes if reply_bytes is None else reply_bytes
        head |= {"seconds": seconds, "memory_bytes": memory_bytes, "reply_bytes": most}
        # Other threads wait while JSON is written: half a second for 30 MB of text.
        request = marshal.dumps(head)
        request = len(request).to_bytes(HEAD_BYTES, "little") + request
        with self._lock:
            try:
                process = self._running()
                for part in (request, content):
                    _write(process, part)
                reply = _read(process, 2 * seconds, most, memory_bytes)
            except BaseException:
                # After an interrupt, the next reply would be that of this request.
                self._end()
                raise
        if "value" in reply:
            return reply["value"]
        raise (Broken if reply.get("broken") else Refused)(reply["reason"])

    def close(self) -> None:
        """End the process, if there is one; the next call starts another."""
        with self._lock:
            self._end()

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is not None and self._process.poll() is not None:
            self._end()
        if self._process is None:
            # What this process can import, the child can. -P: nothing of the current directory.
            path = os.pathsep.join(filter(None, sys.path))
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-P", "-m", WORKER],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    bufsize=0,
                    env={**os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false"},
                    process_group=0,  # Ctrl-C in a terminal is for the parent alone
                )
            except OSError as error:
                raise Broken(f"no process could be started ({error.strerror or error})") from error
            _read(self._process, START_SECONDS, self._reply_bytes, MEMORY_BYTES)
        return self._process

    def _end(self) -> None:
        if self._process is not None:
            process, self._process = self._process, None
            process.kill()
            with process:  # closes the pipes and waits
                pass


def _write(process: subprocess.Popen[bytes], request: bytes) -> None:
    assert process.stdin is not None
    left = memoryview(request)
    with contextlib.suppress(BrokenPipeError):  # reading its reply says why
        while left:
            left = left[os.write(process.stdin.fileno(), left) :]


def _read(
    process: subprocess.Popen[bytes], seconds: float, most: int, memory_bytes: int
) -> dict[str, Any]:
    """Return the next reply: a line of JSON and, if that says so, the bytes of its value behind it.

    Raises:
        Broken: It did not come in time, or is longer than `most` bytes, or the process ended, or
            became larger than `memory_bytes`.
    """
    assert process.stdout is not None
    fd, until, data = process.stdout.fileno(), monotonic() + seconds, bytearray()
    ready = select.poll()
    ready.register(fd, select.POLLIN)
    end, reply, needed = -1, {}, 1
    while len(data) < needed:
        left = until - monotonic()
        if not ready.poll(max(min(left, WATCH_SECONDS), 0) * 1000):
            if left <= 0:
                raise Broken(f"it did not end within {seconds:g} s")
            if size_of(process.pid) > memory_bytes:
                raise Broken(f"it takes more than {memory_bytes >> 20} MiB of memory")
            continue
        piece = os.read(fd, 1 << 20)
        if not piece:
            raise Broken(_ending(process))
        data += piece
        if len(data) > most:
            raise Broken(f"its output has more than {most >> 20} MiB")
        if end < 0:
            end, needed = data.find(b"\n"), len(data) + 1
            if end >= 0:
                reply = json.loads(data[:end])
                needed = end + 1 + reply.get("bytes", 0)
    if "bytes" in reply:
        value = bytes(memoryview(data)[end + 1 :])
        reply["value"] = value.decode("utf-8", "surrogatepass") if reply["text"] else value
    return reply


class _Usage(ctypes.Structure):
    """`struct rusage_info_v0` of macOS's <sys/resource.h>."""

    _fields_ = (
        ("uuid", ctypes.c_uint8 * 16),
        *((name, ctypes.c_uint64) for name in (
            "user_time", "system_time", "pkg_idle_wkups", "interrupt_wkups", "pageins",
            "wired_size", "resident_size", "phys_footprint", "start", "exit",
        )),
    )  # fmt: skip


def size_of(pid: int) -> int:
    """Return the bytes of memory that a process of this user takes; 0 once it has ended, and where
    the system does not tell: then time alone bounds it."""
    if sys.platform == "darwin":
        usage, ask = _Usage(), getattr(ctypes.CDLL(None), "proc_pid_rusage", None)
        failed = ask is None or ask(pid, 0, ctypes.byref(usage))
        # The footprint has what is compressed or swapped, which the resident size lacks.
        return 0 if failed else usage.phys_footprint
    try:
        pages = Path(f"/proc/{pid}/statm").read_text().split()[1]
    except (OSError, IndexError):
        return 0
    return int(pages) * os.sysconf("SC_PAGE_SIZE")


def _ending(process: subprocess.Popen[bytes]) -> str:
    """Say how a process ended that closed its output."""
    try:
        status = process.wait(5)
    except subprocess.TimeoutExpired:
        return "its process closed its output"
    if status == -signal.SIGXCPU:
        return "it did not end in time"
    return f"it ended its process with status {status}: too much memory, or a crash"


child = Child()
tokenizer_child = Child()
for _one in (child, tokenizer_child):
    atexit.register(_one.close)


def _forget() -> None:
    """In a forked process: the children are the parent's."""
    for one in (child, tokenizer_child):
        one.__init__()


os.register_at_fork(after_in_child=_forget)

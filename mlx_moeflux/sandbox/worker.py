"""The child process: reads requests from standard input and writes a line of JSON for each, and
behind it the bytes of its value."""

from __future__ import annotations

import contextlib
import json
import marshal
import os
import resource
import sys
import time
from array import array
from collections.abc import Iterator
from typing import Any

from mlx_moeflux.errors import UnsupportedError
from mlx_moeflux.sandbox.process import HEAD_BYTES
from mlx_moeflux.sandbox.template import compiled, names, rendered
from mlx_moeflux.tokenizer_backends import (
    BytePairs,
    SentencePieces,
    backend_of,
    facts_of,
    try_out,
)

MOST_REASON = 1000  # characters
MOST_WORD = 100


def _render(content: bytes, most: int, *, template: str, variables: dict[str, Any]) -> str:
    return rendered(template, variables, most=most)


def _names(content: bytes, most: int, *, template: str) -> dict[str, list[str]]:
    return names(template, most=MOST_WORD)


def _compile(content: bytes, most: int, *, template: str) -> None:
    compiled(template)


_held: dict[str, BytePairs | SentencePieces] = {}
"""The last tokenizer that stays in this process, by its key."""


def _tokenizer(content: bytes, most: int, *, kind: str, key: str) -> dict[str, Any]:
    """Build and try a tokenizer; keep it, and return its facts, unless the parent may run it."""
    _held.clear()
    try:
        backend = backend_of(kind, content)
    except UnsupportedError as error:
        return {"unsupported": str(error)}
    try_out(backend)
    if isinstance(backend, BytePairs):
        from mlx_moeflux.tokenizer_kinds import runs_here

        if runs_here(backend.backend):
            return {"here": True}
    _held[key] = backend
    return {"here": False, **facts_of(backend)}


def _encode(content: bytes, most: int, *, key: str, special: bool) -> bytes | None:
    """Return ids as 32-bit numbers; None if the tokenizer is not here."""
    if key not in _held:
        return None
    return array("I", _held[key].encode(content.decode(), special)).tobytes()


JOBS = {
    "render": _render,
    "compile": _compile,
    "names": _names,
    "tokenizer": _tokenizer,
    "encode": _encode,
}


@contextlib.contextmanager
def _bounded(seconds: float, memory_bytes: int) -> Iterator[None]:
    """Bound processor time, which ends the process, and memory, which raises MemoryError or ends
    it."""
    most = int(time.process_time() + seconds) + 1
    _limit(resource.RLIMIT_CPU, most)
    _limit(resource.RLIMIT_AS, memory_bytes)
    try:
        yield
    finally:
        _limit(resource.RLIMIT_AS, resource.RLIM_INFINITY)


def _limit(kind: int, most: int) -> None:
    hard = resource.getrlimit(kind)[1]
    if hard != resource.RLIM_INFINITY and not 0 <= most <= hard:
        most = hard
    with contextlib.suppress(ValueError, OSError):  # macOS refuses some
        resource.setrlimit(kind, (most, hard))


def _answer(head: dict[str, Any], content: bytes) -> bytes:
    """Return the reply to a request."""
    memory, most = head["memory_bytes"], head["reply_bytes"]
    too_long = f"its output has more than {most >> 20} MiB"
    try:
        with _bounded(head["seconds"], memory):
            value = JOBS[head["job"]](content, most, **head["given"])
            reply = _written(value)
        if len(reply) < most:
            return reply
        reason, broken = too_long, True
    except OverflowError as error:
        reason, broken = (str(error), False) if str(error) else (too_long, True)
    except MemoryError:
        reason, broken = f"it takes more than {memory >> 20} MiB of memory", True
    # A panic of Rust is a BaseException.
    except BaseException as error:  # noqa: BLE001
        reason, broken = " ".join(str(error).split()) or type(error).__name__, False
    return _line({"reason": reason[:MOST_REASON], "broken": broken})


def _written(value: Any) -> bytes:
    """A text, or bytes, stand as they are behind their length: JSON would be read for half a
    second."""
    if not isinstance(value, str | bytes):
        return _line({"value": value})
    text = isinstance(value, str)
    content = value.encode("utf-8", "surrogatepass") if text else value
    return _line({"bytes": len(content), "text": text}) + content


def _line(head: dict[str, Any]) -> bytes:
    return json.dumps(head).encode() + b"\n"


def main() -> None:
    """Serve requests until standard input ends."""
    replies = os.dup(1)
    os.dup2(2, 1)  # what a library prints is no reply
    reply = _line({})
    with os.fdopen(replies, "wb") as out:
        while True:
            out.write(reply)
            out.flush()
            size = sys.stdin.buffer.read(HEAD_BYTES)
            if len(size) < HEAD_BYTES:
                return
            head = marshal.loads(sys.stdin.buffer.read(int.from_bytes(size, "little")))
            reply = _answer(head, sys.stdin.buffer.read(head["bytes"]))


if __name__ == "__main__":
    main()

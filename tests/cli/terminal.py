"""A command in a terminal of its own, and what its screen shows in the end."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Mapping, Sequence

WIDTH = 100


def in_terminal(
    arguments: Sequence[str], *, env: Mapping[str, str] | None = None, seconds: float = 100
) -> tuple[int, str]:
    """Run ``mlx_moeflux arguments`` with a terminal as stdout and stderr; return its exit status
    and everything that it wrote."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, WIDTH, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-m", "mlx_moeflux", *arguments],
        stdin=subprocess.DEVNULL, stdout=slave, stderr=slave,
        env={**(os.environ if env is None else env), "TERM": "xterm"},
    )  # fmt: skip
    os.close(slave)
    parts, until = [], time.monotonic() + seconds
    try:
        while time.monotonic() < until:
            try:
                part = os.read(master, 1 << 16)
            except OSError:  # Linux: the last writer has closed it.
                break
            if not part:
                break
            parts.append(part)
    finally:
        os.close(master)
        process.kill() if time.monotonic() >= until else None
    return process.wait(), b"".join(parts).decode()


def screen(written: str) -> list[str]:
    """The lines that a terminal shows in the end, without spaces at their ends."""
    lines, row, column = [""], 0, 0
    for piece in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+|\x1b", written):
        if piece == "\r":
            column = 0
        elif piece == "\n":
            row += 1
        elif piece.startswith("\x1b["):
            count = int(re.sub(r"\D", "", piece) or 1)
            if piece.endswith("A"):
                row = max(0, row - count)
            elif piece.endswith("B"):
                row += count
            elif piece.endswith("K"):
                lines[row] = lines[row][:column]
        else:
            lines[row] = lines[row].ljust(column)
            lines[row] = lines[row][:column] + piece + lines[row][column + len(piece) :]
            column += len(piece)
        lines += [""] * (row + 1 - len(lines))
    return [line.rstrip() for line in lines]

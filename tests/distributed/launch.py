"""Starts the ranks of a run on this machine, as ``mlx.launch --backend ring`` does on several."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

REPOSITORY = Path(__file__).parents[2]
PROGRAM = Path(__file__).with_name("program.py")
# Of a whole run, on a machine with other things to do.
SECONDS = 240


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def start(
    folder: Path, commands: Sequence[Sequence[str]], *, inputs: Sequence[Any] = ()
) -> list[Any]:
    """Start one command for each rank; inputs: Its standard input."""
    folder.mkdir(parents=True, exist_ok=True)
    hosts = folder / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(len(commands))]))
    # MLX's CPU back end and BLAS each start a thread a core.
    environment = os.environ | {
        "MLX_HOSTFILE": str(hosts),
        "PYTHONPATH": str(REPOSITORY),
        "OPENBLAS_NUM_THREADS": "1",
    }
    return [
        subprocess.Popen(
            list(command),
            cwd=REPOSITORY,
            env={**environment, "MLX_RANK": str(rank)},
            stdin=inputs[rank] if inputs else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, command in enumerate(commands)
    ]


def start_job(folder: Path, ranks: int, job: str, *jobs: dict[str, Any]) -> list[Any]:
    """Start ``program.py``; `jobs`: the arguments of `job`, the same for all ranks or one each."""
    every = list(jobs) * (ranks if len(jobs) == 1 else 1)
    commands = [
        [sys.executable, str(PROGRAM), str(folder), job, json.dumps(each)] for each in every
    ]
    return start(folder, commands)


def results(folder: Path, ranks: int, job: str, *jobs: dict[str, Any]) -> list[dict[str, Any]]:
    """Run a job; what it returned on each rank."""
    processes = start_job(folder, ranks, job, *jobs)
    ends = [process.communicate(timeout=SECONDS) for process in processes]
    codes = [process.returncode for process in processes]
    assert codes == [0] * ranks, [err[-2000:] for _, err in ends]
    return [dict(np.load(folder / f"rank{rank}.npz")) for rank in range(ranks)]

"""What the other ranks do when one is killed, stopped, cut off, or has other weights. Oracle: each
ends within 10 seconds with status 1 and one line on stderr."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from mlx_moeflux.conversion.synthesize import synthesize
from tests.distributed.launch import start_job

LIMIT = 10.0
STARTED = 120.0
SHAPE = "qwen3.5-tiny"


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> str:
    return str(synthesize(SHAPE, tmp_path_factory.mktemp("shape") / SHAPE))


def wait_for(files: list[Path], processes: list) -> None:
    end = time.monotonic() + STARTED
    while not all(file.exists() for file in files):
        assert time.monotonic() < end, "the ranks do not start"
        for process in processes:
            assert process.poll() is None, process.communicate()[1][-2000:]
        time.sleep(0.05)


def ends(processes: list, within: float = LIMIT) -> list[str]:
    """The lines of processes that must end with status 1 and one line each."""
    end = time.monotonic() + within
    lines = []
    for process in processes:
        try:
            _, err = process.communicate(timeout=max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            pytest.fail(f"a rank still runs after {within} s")
        assert process.returncode == 1, (process.returncode, err[-2000:])
        # MLX's ring writes lines of its own, in pieces that others may come between.
        ours = re.findall("error: .*", err)
        assert len(ours) == 1, err
        assert "Traceback" not in err
        lines += ours
    return lines


def kill_all(processes: list) -> None:
    for process in processes:
        if process.poll() is None:
            process.kill()
        process.communicate()


def check_fault(folder: Path, job: dict, ranks: int, rank: int, fault, seconds: float) -> None:
    """Let ranks run for `seconds`, then do `fault` to one."""
    processes = start_job(folder, ranks, "forever", job)
    try:
        wait_for([folder / f"running{i}" for i in range(ranks)], processes)
        time.sleep(seconds)
        fault(processes[rank])
        others = [process for i, process in enumerate(processes) if i != rank]
        for err in ends(others):
            assert f"rank {rank} is lost" in err or f"rank {rank} failed" in err, err
    finally:
        kill_all(processes)


def killed(process) -> None:
    process.kill()


def stopped(process) -> None:
    os.kill(process.pid, signal.SIGSTOP)


@pytest.mark.slow
@pytest.mark.parametrize("moment", range(5))
@pytest.mark.parametrize("rank", [0, 1, 2])
@pytest.mark.parametrize("fault", [killed, stopped])
def test_the_others_end(fault, rank, moment, directory, tmp_path):
    seconds = random.Random(f"{fault.__name__} {rank} {moment}").uniform(0, 2)
    job = {"path": directory, "traced": moment > 1, "memory": ("50%", "100%")[moment % 2]}
    check_fault(tmp_path, job, 3, rank, fault, seconds)


@pytest.mark.slow
@pytest.mark.parametrize("memory", ["50%", "100%"])
@pytest.mark.parametrize("traced", [False, True])
def test_a_cut_ring_ends_all(traced, memory, directory, tmp_path):
    """The connections of the collectives are cut, that of the heartbeat is not."""
    job = {"path": directory, "traced": traced, "memory": memory}
    processes = start_job(tmp_path, 2, "cut_ring", job)
    try:
        for err in ends(processes, STARTED):
            assert "wait for each other" in err or "a collective" in err, err
        for rank in range(2):
            cut = float((tmp_path / "cut").read_text())
            ended = (tmp_path / f"alive{rank}").stat().st_mtime
            assert ended - cut < LIMIT
    finally:
        kill_all(processes)


@pytest.mark.slow
@pytest.mark.parametrize("lengths", [[20, 21], [21, 20], [5, 90]])
def test_other_prompts_on_one_rank(lengths, directory, tmp_path):
    processes = start_job(tmp_path, 2, "prompts", {"path": directory, "lengths": lengths})
    try:
        ends(processes, STARTED)
    finally:
        kill_all(processes)


@pytest.mark.slow
@pytest.mark.parametrize("traced", [False, True])
def test_a_failed_read_ends_all(traced, directory, tmp_path):
    """Rank 1 reads from a copy whose experts are cut off while it runs."""
    copy = shutil.copytree(directory, tmp_path / "copy")
    jobs = [{"path": path, "traced": traced} for path in (directory, str(copy))]
    processes = start_job(tmp_path, 2, "forever", *jobs)
    try:
        wait_for([tmp_path / f"running{i}" for i in range(2)], processes)
        for file in copy.glob("*.safetensors"):
            os.truncate(file, 4096)
        first, second = ends(processes)
        assert first.startswith("error: rank 1 failed: ")
        assert "copy" in first
        assert "copy" in second
    finally:
        kill_all(processes)


@pytest.mark.slow
def test_a_full_disk_ends_all(directory, tmp_path):
    """Rank 1 cannot write its state; rank 0 waits for it in the next step."""
    processes = start_job(tmp_path, 2, "full_disk", {"path": directory})
    try:
        first, second = ends(processes, STARTED)
        assert "state1" in second
        causes = "rank 1 is lost", "wait for each other", "a collective failed"
        assert any(cause in first for cause in causes), first
    finally:
        kill_all(processes)


@pytest.mark.slow
def test_other_weights_on_one_rank(directory, tmp_path):
    other = str(synthesize(SHAPE, tmp_path / "other", seed=1))
    processes = start_job(
        tmp_path, 3, "load", *({"path": p} for p in (directory, other, directory))
    )
    try:
        for err in ends(processes, STARTED):
            assert err.startswith("error: rank 1 has another model than rank 0")
    finally:
        kill_all(processes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "values", "name"),
    [
        ("version", ["1", "2"], "version of mlx_moeflux"),
        ("placement", ["id", "memory:1GB,2GB"], "placement"),
        ("kernels", [None, "reference"], "choice of kernels"),
        ("exact_prompts", [False, True], "exact_prompts"),
        ("max_context", [64, 65], "max_context"),
    ],
)
def test_other_options_on_one_rank(option, values, name, directory, tmp_path):
    jobs = [{"path": directory, option: value} for value in values]
    processes = start_job(tmp_path, 2, "load", *jobs)
    try:
        for err in ends(processes, STARTED):
            assert err.startswith(f"error: rank 1 has another {name} than rank 0")
    finally:
        kill_all(processes)

"""Oracle: the kernel's peak of a fresh process (VmHWM), and the disk's best direct reads."""

from __future__ import annotations

import itertools
import json
import mmap
import os
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mlx_moeflux.checkpoint.source import open_checkpoint
from mlx_moeflux.conversion.convert import convert
from mlx_moeflux.conversion.synthesize import SHAPES, synthesize
from mlx_moeflux.experts.io.native_pool import open_pool
from mlx_moeflux.experts.io.read_pool import HostSlots
from mlx_moeflux.experts.io.readers import make_reader
from mlx_moeflux.models import map_checkpoint

THREADS = (1, 4, 8, 16)  # of parallel direct readers
READING = 8  # threads of a pool

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc, evicts pages")

CHILD = """
    import json, sys
    import mlx.core as mx
    import numpy as np
    from mlx_moeflux.loading import load_model
    def hwm():
        line = next(x for x in open("/proc/self/status") if x.startswith("VmHWM"))
        return int(line.split()[1]) * 1024
    mx.eval(mx.ones(8) + 1)
    base = hwm()
    path, memory, prompt, new = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    with load_model(path, expert_memory=memory, expert_reader=sys.argv[5]) as model:
        cache = model.make_cache()
        ids = mx.array(np.random.default_rng(0).integers(0, 1000, (1, prompt)))
        logits = model(ids, cache, last_only=True)
        mx.eval(logits)
        prefill = model.store.stats().snapshot()
        for _ in range(new):
            logits = model(mx.argmax(logits[:, -1:], axis=-1), cache)
            mx.eval(logits)
        decode = model.store.stats().since(prefill).total
        print(json.dumps({
            "hwm": hwm(),
            "base": base,
            "trunk": model.plan.trunk_bytes,
            "budget": model.plan.budget_bytes,
            "state": model.state_bytes(prompt + new),
            "activations": model.activation_bytes(prompt),
            "misses": [s.misses for s in prefill.layers.values()],
            "decode_bytes": decode.bytes_read,
            "decode_stall": decode.stall_seconds,
        }))
"""


def run(path: Path, memory: str, prompt: int, new: int, reader: str = "auto") -> dict:
    options = str(path), memory, str(prompt), str(new), reader
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(CHILD), *options],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def checkpoint(
    folder: Path, monkeypatch, *, layers: int, experts: int, hidden: int, width: int
) -> Path:
    shape = replace(
        SHAPES["qwen3.5-tiny"],
        hidden_size=hidden,
        moe_intermediate_size=width,
        num_hidden_layers=layers,
        num_experts=experts,
    )
    monkeypatch.setitem(SHAPES, "test", shape)
    return synthesize("test", folder / "model")


def allowance(measured: dict) -> int:
    return sum(measured[k] for k in ("trunk", "budget", "state", "activations")) + 300_000_000


def hold(measured: dict) -> None:
    allowed = allowance(measured)
    print(f"VmHWM {measured['hwm'] / 1e6:.0f} MB of {allowed / 1e6:.0f} MB")  # noqa: T201
    assert min(measured["misses"]) > 0
    assert measured["hwm"] <= allowed


def test_peak_memory_keeps_to_the_budget(tmp_path, monkeypatch):
    path = checkpoint(tmp_path, monkeypatch, layers=4, experts=144, hidden=256, width=256)
    size = sum(f.stat().st_size for f in path.iterdir())
    assert size > 64_000_000
    measured = run(path, "8MB", 200, 5)
    hold(measured)
    # The bound above would also hold for a small model that is wholly resident: what this one
    # needed beyond the interpreter and MLX must be far below its 64 MB of experts.
    grown = measured["hwm"] - measured["base"]
    assert grown <= measured["trunk"] + measured["budget"] + 48_000_000


BUDGETS = ("20%", "30%", "45%", "60%", "80%")
PROMPTS = (3, 600)
READERS = ("pread", "direct", "mmap")
RUNS = list(itertools.product(BUDGETS, PROMPTS, READERS, ("stock", "packed")))


@pytest.mark.slow
def test_the_formula_holds_in_sixty_processes(tmp_path, monkeypatch):
    """Every second run has a model of 120 MB, the others one of 15 MB."""
    paths = {}
    for size, (layers, experts, hidden, width) in {
        "large": (6, 192, 256, 256),
        "small": (4, 40, 256, 256),
    }.items():
        stock = checkpoint(
            tmp_path / size, monkeypatch, layers=layers, experts=experts, hidden=hidden, width=width
        )
        paths[size, "stock"] = stock
        paths[size, "packed"] = convert(stock, tmp_path / size / "packed")
    total = sum(f.stat().st_size for f in paths["large", "stock"].iterdir())
    assert 120_000_000 < total < 180_000_000
    assert len(RUNS) == 60
    least = 1.0
    for i, (budget, prompt, reader, form) in enumerate(RUNS):
        # Forms alternate fastest: shift each pair, so that every form meets every size.
        size = "large" if (i + i // 2) % 2 else "small"
        measured = run(paths[size, form], budget, prompt, 4, reader)
        allowed = allowance(measured)
        assert measured["hwm"] <= allowed, (size, form, budget, prompt, reader, measured)
        assert min(measured["misses"]) > 0
        least = min(least, 1 - measured["hwm"] / allowed)
    print(f"60 runs; nearest to the limit: {100 * least:.0f} % below it")  # noqa: T201


def evict(path: Path) -> None:
    """Drop a file's pages from the cache, and see that they are gone."""
    import ctypes

    fd = os.open(path, os.O_RDONLY)
    try:
        os.fdatasync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        size = os.fstat(fd).st_size
        with mmap.mmap(fd, size, prot=mmap.PROT_READ) as view:
            pages = -(-size // mmap.PAGESIZE)
            resident = (ctypes.c_ubyte * pages)()
            address = ctypes.c_void_p(np.frombuffer(view, np.uint8).ctypes.data)
            libc = ctypes.CDLL(None, use_errno=True)
            assert libc.mincore(address, ctypes.c_size_t(size), resident) == 0
            assert sum(b & 1 for b in resident) <= 0.02 * pages
            del address
    finally:
        os.close(fd)


def evict_all(path: Path) -> None:
    for file in path.rglob("*"):
        if file.is_file() and file.stat().st_size > 1_000_000:
            evict(file)


def direct_speed(files: list[Path], block: int, threads: int, reads: int, seed: int) -> float:
    """Bytes a second of random aligned direct reads of one block each."""
    return read_speed(files, block, threads, reads, seed, os.O_DIRECT)


def read_speed(
    files: list[Path], block: int, threads: int, reads: int, seed: int, flags: int = 0
) -> float:
    """Bytes a second of random aligned reads of one block each."""
    random = np.random.default_rng(seed)
    fds = [os.open(f, os.O_RDONLY | flags) for f in files]
    sizes = [os.fstat(fd).st_size for fd in fds]
    aligned = -(-block // 4096) * 4096
    plan = [
        (fds[i], int(random.integers(0, (sizes[i] - aligned) // 4096)) * 4096)
        for i in random.integers(0, len(fds), reads)
    ]

    def read(at: tuple[int, int]) -> int:
        buffer = mmap.mmap(-1, aligned)
        return os.preadv(at[0], [buffer], at[1])

    with ThreadPoolExecutor(threads) as pool:
        began = time.perf_counter()
        total = sum(pool.map(read, plan))
        seconds = time.perf_counter() - began
    for fd in fds:
        os.close(fd)
    assert total == reads * aligned
    return reads * block / seconds


def reader_speed(path: Path, reads: int, seed: int) -> float:
    """Bytes a second of random experts of a layer, by the threads of a streamed model, into memory
    that has been written before."""
    reader = make_reader("pread", map_checkpoint(open_checkpoint(path)).experts)
    layer = reader.layers[seed % len(reader.layers)]
    layout = reader.layout(layer)
    threads, slots = open_pool(reader, READING, None), HostSlots(layout, reads)
    for view, _ in slots.views:
        np.frombuffer(view, np.uint8)[:: mmap.PAGESIZE] = 1
    chosen = np.random.default_rng(seed).choice(reader.num_experts, reads, replace=False)
    fetch = threads.fetch(layer, slots, [(e, i) for i, e in enumerate(chosen.tolist())])
    began = time.perf_counter()
    fetch.start()
    assert fetch.wait() is None
    seconds = time.perf_counter() - began
    threads.close()
    reader.close()
    return reads * layout.nbytes / seconds


@pytest.mark.slow
def test_four_gigabytes_of_experts_under_512_megabytes(tmp_path, monkeypatch):
    path = checkpoint(tmp_path, monkeypatch, layers=18, experts=512, hidden=512, width=512)
    assert sum(f.stat().st_size for f in path.iterdir()) > 4_000_000_000
    evict_all(path)
    measured = run(path, "512MB", 2000, 50)
    hold(measured)
    block = 3 * 512 * 512 * 9 // 16
    speeds: dict[int, list[float]] = {threads: [] for threads in THREADS}
    for i in range(5):
        for threads, seen in speeds.items():
            evict_all(path)
            seen.append(direct_speed(sorted(path.glob("*.safetensors")), block, threads, 400, i))
    best = max(np.median(seen) for seen in speeds.values())
    print(  # noqa: T201
        f"best direct {best / 1e9:.2f} GB/s; decode stall {measured['decode_stall']:.2f} s for "
        f"{measured['decode_bytes'] / 1e9:.2f} GB"
    )
    assert measured["decode_stall"] <= 1.15 * measured["decode_bytes"] / best


@pytest.mark.slow
def test_cold_reads_are_as_fast_as_the_disk(tmp_path, monkeypatch):
    """Experts of the 35B's size, packed and stock, against reads of one block each: direct ones,
    and plain ones, which are copied, too, so that another process that has a core slows them as
    well. Those write into fresh memory, which costs them more."""
    path = checkpoint(tmp_path, monkeypatch, layers=5, experts=256, hidden=2048, width=512)
    packed = convert(path, tmp_path / "packed")
    files, block = sorted((packed / "experts").glob("*.bin")), 3 * 2048 * 512 * 9 // 16
    direct: dict[int, list[float]] = {threads: [] for threads in THREADS}
    plain: list[float] = []
    ours: dict[Path, list[float]] = {packed: [], path: []}
    # Each round measures every way once, so that a shared disk's drift meets all alike.
    for i in range(7):
        for threads, seen in direct.items():
            evict_all(packed)
            seen.append(direct_speed(files, block, threads, 200, i))
        evict_all(packed)
        plain.append(read_speed(files, block, READING, 200, i))
        for folder, seen in ours.items():
            evict_all(folder)
            seen.append(reader_speed(folder, 200, i))
    best = max(direct.values(), key=np.median)
    # Of one round, since a shared disk's speed changes from round to round.
    of_direct, of_plain = (
        {way: np.median(np.divide(seen, other)) for way, seen in ours.items()}
        for other in (best, plain)
    )
    print(  # noqa: T201
        f"direct {np.median(best) / 1e9:.2f} GB/s; packed {of_direct[packed]:.3f} of that and "
        f"{of_plain[packed]:.3f} of plain reads, stock {of_direct[path]:.3f} and "
        f"{of_plain[path]:.3f}, medians of 7"
    )
    assert min(of_plain.values()) >= 0.9
    # Two cores copy as fast as a disk of 2 GB/s reads: 0.87 where nothing else runs.
    assert min(of_direct.values()) >= 0.75

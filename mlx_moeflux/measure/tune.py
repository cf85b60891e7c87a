"""Measures what suits this machine and this model: budget, reader, threads, prefetcher.

More memory for experts is not always faster: they compete with the page cache. So the budget is
the smallest that is as fast as any, found by decoding, not by a share of the memory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, cast

import mlx.core as mx
import numpy as np

from mlx_moeflux.checkpoint.files import write_output
from mlx_moeflux.checkpoint.hub import resolve
from mlx_moeflux.checkpoint.source import open_checkpoint
from mlx_moeflux.errors import MemoryBudgetError, UnsupportedError
from mlx_moeflux.experts.io.native_pool import open_pool
from mlx_moeflux.experts.io.read_pool import HostSlots
from mlx_moeflux.experts.io.readers import make_reader
from mlx_moeflux.experts.policies.named import NONE
from mlx_moeflux.experts.policies.prefetch import LastToken, LookAhead, make_prefetch
from mlx_moeflux.experts.streaming.store import StreamedStore
from mlx_moeflux.experts.telemetry.forecast import Profile
from mlx_moeflux.loading import load_model
from mlx_moeflux.measure.benchmark.pages import evict
from mlx_moeflux.measure.disk import expert_files
from mlx_moeflux.models import map_checkpoint
from mlx_moeflux.models.decoder import DecoderModel

THREADS = (1, 2, 4, 8, 16, 32)
READERS = ("pread", "direct")
PREFETCHES = (NONE, LastToken.name, LookAhead.name)
SHARES = (0.1, 0.2, 0.35, 0.5, 0.75, 1.0)
CLOSE = 0.03
"""What is slower than the best by less than this share is as good, if it takes less."""

Report = Callable[[str], None]


@dataclass
class Tuning:
    """The result of :func:`tune`. model: The checkpoint's identity. measured: (label, seconds).

    The file is also a :class:`~mlx_moeflux.experts.telemetry.forecast.Profile`; what synchronising
    costs is contained in `token_seconds`.
    """

    model: str
    expert_memory: str | int
    expert_reader: str
    expert_threads: int
    prefetch: str
    token_seconds: float
    sync_seconds: float
    read_seconds: tuple[float, ...]
    host_seconds: float = 0.0
    measured: list[tuple[str, float]] = field(default_factory=list)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the file that ``load(tuning=...)`` takes.

        Raises:
            InputError: It cannot be written.
        """
        write_output(path, (json.dumps(asdict(self), indent=2) + "\n").encode())

    def profile(self) -> Profile:
        """For :func:`~mlx_moeflux.experts.telemetry.forecast.forecast`."""
        return Profile(
            self.token_seconds, self.sync_seconds, tuple(self.read_seconds), self.host_seconds
        )


def tune(
    path: str | os.PathLike[str],
    *,
    budgets: Sequence[str] | None = None,
    tokens: int = 32,
    repeats: int = 3,
    strict_config: bool = True,
    report: Report = lambda line: None,
) -> Tuning:
    """Measure budgets, readers, threads and prefetchers, and choose the fastest.

    Args:
        budgets: To try; by default shares of what ``auto`` could give, or only everything where
            everything fits. tokens: Of each decode. repeats: Of each measurement; those of budgets
            and prefetchers alternate, so that a machine that slows down slows all alike.
        strict_config: Refuse unknown keys of config.json and of GGUF's metadata.

    Memory: That of the largest budget.

    Raises:
        MoefluxError: The model cannot be loaded.
    """
    directory = resolve(path)
    checkpoint = open_checkpoint(directory)
    experts = map_checkpoint(checkpoint).experts
    found: list[tuple[str, float]] = []

    def note(what: str, seconds: float) -> float:
        found.append((what, seconds))
        report(f"{what:40} {1e3 * seconds:9.3f} ms")
        return seconds

    threads, curves = {}, {}
    for name in READERS:
        try:
            threads[name], curves[name] = _read_speeds(name, experts, repeats, note)
        except UnsupportedError as error:
            report(str(error))
    reader = min(curves, key=lambda name: curves[name][-1])
    strict: dict[str, Any] = {"strict_config": strict_config}
    with load_model(directory, **strict) as model:
        resident, identity = model.plan is None or model.plan.resident, model.identity
        tries = list(budgets or _budgets(model))
        if resident and budgets is None:
            seconds = note("decode, resident", _decode(model, tokens))
    prefetch, memory = NONE, "100%"
    if not resident or budgets is not None:
        speeds = {}
        for name in curves:
            options = {"expert_reader": name, "expert_threads": threads[name], **strict}
            try:
                with load_model(directory, expert_memory=tries[0], **options) as model:
                    speeds[name] = note(f"decode, {name}, {tries[0]}", _decode(model, tokens))
            except MemoryBudgetError as error:
                # The buffers of direct reads may not fit in so small a budget.
                if name == READERS[0]:
                    raise
                report(f"decode, {name}, {tries[0]}: {error}")
        reader = min(speeds, key=speeds.__getitem__)
        options = {"expert_reader": reader, "expert_threads": threads[reader], **strict}
        with load_model(directory, expert_memory=tries[0], **options) as model:
            memory = _knee(model, tries, tokens, repeats, note)
            model.set_expert_memory(memory)
            prefetch = _best_prefetch(model, tokens, repeats, note)
            stats = model.store.stats()
            stats.reset()
            seconds = _decode(model, tokens)
            seconds -= stats.total.stall_seconds / max(stats.total.tokens, 1)
    return Tuning(
        model=identity,
        expert_memory=memory,
        expert_reader=reader,
        expert_threads=threads[reader],
        prefetch=prefetch,
        token_seconds=max(seconds, 0.0),
        sync_seconds=0.0,
        read_seconds=curves[reader],
        measured=found,
    )


def cheapest(seconds: Mapping[Any, float]) -> Any:
    """The first of `seconds` that is nearly as good as the best: put what takes least first."""
    best = min(seconds.values())
    return next(what for what, each in seconds.items() if each <= best * (1 + CLOSE))


def _budgets(model: DecoderModel) -> list[str]:
    plan, streaming = model.plan, model.store.streaming
    assert plan is not None  # no store of a user is tuned
    most, all_bytes = plan.budget_bytes, plan.expert_bytes
    if not plan.resident:
        if streaming is not None and (timed := streaming.timed_budget) is not None:
            most = timed.larger.nbytes
        most *= 2  # auto takes half of what is left
    K, E = model.router.num_experts_per_tok, model.config.num_experts
    shares = (min(share * most / all_bytes, 1.0) for share in SHARES)
    return [f"{100 * share:.4g}%" for share in sorted({max(share, K / E) for share in shares})]


def _read_speeds(
    name: str, experts: Mapping[int, Any], repeats: int, note: Callable[[str, float], float]
) -> tuple[int, tuple[float, ...]]:
    """Return the best number of threads for a reader, and the seconds of 1 to 8 cold blocks."""
    reader, files = make_reader(name, experts), expert_files(experts)

    def read(threads: int, blocks: int) -> float:
        return _read(reader, files, threads, blocks, repeats)

    try:
        times = {n: note(f"8 blocks, {name}, {n} threads", read(n, 8)) for n in THREADS}
        best = cheapest(times)
        return best, tuple(read(best, n) for n in range(1, 9))
    finally:
        reader.close()


def _read(reader: Any, files: Sequence[Path], threads: int, blocks: int, repeats: int) -> float:
    """Seconds until so many random blocks of one layer have arrived, cold where the system can
    drop them from its cache; the median."""
    random, pool = np.random.default_rng(blocks), open_pool(reader, threads, None)
    try:
        seconds = []
        for _ in range(repeats):
            layer = int(random.choice(reader.layers))
            chosen = random.choice(reader.num_experts, min(blocks, reader.num_experts), False)
            slots = HostSlots(reader.layout(layer), len(chosen))
            evict(files)
            start = perf_counter()
            fetch = pool.fetch(layer, slots, [(int(e), i) for i, e in enumerate(chosen)])
            fetch.start()
            error = fetch.wait()
            seconds.append(perf_counter() - start)
            if error is not None:
                raise error
        return median(seconds)
    finally:
        pool.close()


def _knee(
    model: DecoderModel,
    budgets: Sequence[str],
    tokens: int,
    repeats: int,
    note: Callable[[str, float], float],
) -> str:
    seconds: dict[str, list[float]] = {budget: [] for budget in budgets}
    for _ in range(repeats):
        for budget in budgets:
            model.set_expert_memory(budget)
            seconds[budget].append(_decode(model, tokens))
    return cheapest({b: note(f"decode, {b}", median(each)) for b, each in seconds.items()})


def _best_prefetch(
    model: DecoderModel, tokens: int, repeats: int, note: Callable[[str, float], float]
) -> str:
    store = cast("StreamedStore", model.store)
    seconds: dict[str, list[float]] = {name: [] for name in PREFETCHES}
    try:
        for _ in range(repeats):
            for name, each in seconds.items():
                store.prefetch = make_prefetch(name)
                model.set_store(store)
                each.append(_decode(model, tokens))
        return cheapest(
            {name: note(f"decode, prefetch {name}", median(each)) for name, each in seconds.items()}
        )
    finally:
        store.prefetch = None
        model.set_store(store)


def _decode(model: DecoderModel, tokens: int) -> float:
    """Seconds of a greedy decode step after a short prompt, a few to warm up not counted."""
    random = np.random.default_rng(0)
    cache, warm = model.make_cache(), max(2, tokens // 4)
    following = mx.array(random.integers(0, model.config.vocab_size, 16))
    start = 0.0
    for step in range(warm + tokens):
        if step == warm:
            start = perf_counter()
        following = model(following[None], cache, last_only=True)[0, -1].argmax()[None]
        mx.eval(following)
    return (perf_counter() - start) / tokens

"""The benchmark: card, exactness, then timed pairs at every budget and context."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_moeflux._version import __version__
from mlx_moeflux.backend import describe_backend
from mlx_moeflux.benchmarking import exact, pages
from mlx_moeflux.benchmarking.account import Account, cache_state
from mlx_moeflux.benchmarking.card import (
    Card,
    disk_bandwidth,
    expert_files,
    make_card,
    memory_bandwidth,
)
from mlx_moeflux.benchmarking.report import run_lines
from mlx_moeflux.benchmarking.results import Report, Run, Speeds, Spread, Streaming
from mlx_moeflux.benchmarking.routing import Routing, follow
from mlx_moeflux.benchmarking.sides import MlxLm, Ours, Stream, Timing, run
from mlx_moeflux.checkpoint.names import MappedTensors
from mlx_moeflux.checkpoint.source import open_checkpoint
from mlx_moeflux.errors import InputError
from mlx_moeflux.experts.readers import make_reader
from mlx_moeflux.kernels.choice import choose_kernels
from mlx_moeflux.loading import load_model
from mlx_moeflux.models import model_class
from mlx_moeflux.models.weights import default_dtype
from mlx_moeflux.profiling.capture import check_capture, gpu_capture
from mlx_moeflux.profiling.stages import Profiler

Say = Callable[[str], None]

PROFILED_STEPS, PROFILED_BATCH = 16, 8
CHECKED_SEQUENCES = 4
"""Of a batch, as many are checked for exactness."""


@dataclass(frozen=True)
class Options:
    """What to measure.

    expert_memory: Budgets, one sweep. contexts: Prompt lengths. compare: "mlx-lm" or None.
    cold: Empty the page cache before every trial and after every token. profile: Time the stages
    of a prompt, decode steps and batched steps after the trials. trace: A file for its slices.
    capture: Options of :func:`~mlx_moeflux.profiling.capture.gpu_capture` for one more run.
    load: More options of :func:`~mlx_moeflux.loading.load_model`.
    """

    expert_memory: tuple[str, ...] = ("auto",)
    contexts: tuple[int, ...] = (512,)
    generation_tokens: int = 1024
    batch_size: int = 1
    trials: int = 5
    delay: float = 0.0
    prefill_step_size: int | None = None
    compare: str | None = None
    cold: bool = False
    threads: int = 8
    reader: str = "auto"
    seed: int = 0
    profile: bool = False
    trace: Path | None = None
    capture: dict[str, Any] | None = None
    load: dict[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Plain values; those of `load` as text."""
        plain = {f.name: getattr(self, f.name) for f in fields(self)}
        load = {name: str(value) for name, value in self.load.items()}
        return plain | {"load": load, "trace": None if self.trace is None else str(self.trace)}

    def check(self) -> None:
        """Raise :class:`InputError` for what cannot be measured."""
        for name, least in (("batch_size", 1), ("trials", 1), ("generation_tokens", 2)):
            if getattr(self, name) < least:
                raise InputError(f"{name} is {getattr(self, name)}; it must be at least {least}.")
        if not self.contexts or min(self.contexts) < 1:
            raise InputError("a context must have at least one token.")
        if self.prefill_step_size is not None and self.prefill_step_size < 1:
            raise InputError(f"prefill_step_size is {self.prefill_step_size}; give at least 1.")
        if self.compare not in (None, "mlx-lm"):
            raise InputError(f"there is no comparison with '{self.compare}'; give mlx-lm.")
        if self.capture is not None:
            check_capture(self.capture["file"])
        if self.cold and not hasattr(os, "posix_fadvise"):
            raise InputError("this system cannot empty its page cache; leave out --cold.")


def machine() -> str:
    """The machine in general words: ``2-core x86_64 CPU``, or the GPU's name."""
    if mx.default_device() == mx.cpu:
        return f"{os.cpu_count()}-core {platform.machine()} CPU"
    return str(mx.device_info(mx.gpu).get("device_name", "unknown GPU"))


def benchmark(
    directory: Path, options: Options, *, name: str | None = None, say: Say = lambda line: None
) -> Report:
    """Measure a checkpoint.

    say: Called with each line of progress, in mlx-lm's words where it has them.

    Raises:
        ExactnessError: Results are wrong; nothing was timed.
        MoefluxError: Another kind: an option, the checkpoint, the memory.
    """
    options.check()
    bench = _Bench(Path(directory), options, say)
    return bench.report(name or Path(directory).name)


class _Bench:
    """What stays the same between the runs of one benchmark."""

    def __init__(self, directory: Path, options: Options, say: Say):
        self.directory, self.options, self.say = directory, options, say
        checkpoint = open_checkpoint(directory)
        kind = model_class(checkpoint.config.get("model_type"), file=checkpoint.config_file)
        self.mapped: MappedTensors = checkpoint.mapped(kind.NAME_RULES)
        self.files = expert_files(self.mapped)
        self.dtype = str(options.load.get("dtype") or default_dtype()).removeprefix("mlx.core.")
        self.longest = max(options.contexts) + options.generation_tokens

    def report(self, name: str) -> Report:
        options = self.options
        memory = memory_bandwidth()
        disk = disk_bandwidth(self.mapped, threads=options.threads, seed=options.seed)
        report = Report(
            model=name,
            machine=machine(),
            versions={"mlx_moeflux": __version__, "backend": describe_backend()},
            card={},
            exact=[],
            options=options.as_dict(),
        )
        with ExitStack() as stack:
            theirs = None
            if options.compare:
                theirs = MlxLm(self.directory, prefill_step_size=options.prefill_step_size)
                stack.callback(theirs.close)
            expected = self._expected()
            for budget in options.expert_memory:
                with self._ours(budget) as ours:
                    card = make_card(ours.model, memory=memory, disk=disk)
                    if not report.card:
                        for line in card.lines(self.longest):
                            self.say(line)
                        report.card = card.as_dict(self.longest)
                    self._check(ours, theirs, expected, budget, report)
                    for context in options.contexts:
                        report.runs.append(self._measure(ours, theirs, card, budget, context))
        peak = pages.peak_process_bytes()
        report.peak_process = None if peak is None else peak / 1e9
        return report

    @contextmanager
    def _ours(self, budget: str, **more: Any) -> Iterator[Ours]:
        before, options = mx.get_active_memory(), self.options
        more = {"expert_memory": budget, "expert_reader": options.reader} | more
        model = load_model(self.directory, expert_threads=options.threads, **more, **options.load)
        with model:
            if model.plan is not None:
                self.say(str(model.plan))
            held = mx.get_active_memory() - before
            yield Ours(model, prefill_step_size=options.prefill_step_size, held_bytes=held)
        mx.clear_cache()

    def _check_ids(self, vocabulary: int) -> np.ndarray:
        tokens = exact.PREFILL_TOKENS + exact.DECODE_TOKENS
        random = np.random.default_rng(self.options.seed + 1)
        batch = min(self.options.batch_size, CHECKED_SEQUENCES)
        return random.integers(0, vocabulary, (batch, tokens)).astype(np.int32)

    def _expected(self) -> tuple[np.ndarray, np.ndarray]:
        """Ids and the logits of the model whose experts are read anew on every call."""
        kernels = choose_kernels(self.options.load.get("kernels"))
        reader = make_reader("auto", self.mapped.experts)
        store = exact.FreshStore(reader, ffn=kernels.expert_ffn)
        with self._ours("auto", store=store) as fresh:
            ids = self._check_ids(fresh.model.config.vocab_size)
            return ids, fresh.logits(ids)

    def _check(
        self,
        ours: Ours,
        theirs: MlxLm | None,
        expected: tuple[np.ndarray, np.ndarray],
        budget: str,
        report: Report,
    ) -> None:
        ids, fresh = expected
        found = ours.logits(ids)
        kind = "resident" if ours.model.plan.resident else "streamed"
        what = f"{kind} ({budget}) against experts read anew"
        lines = [exact.hold_same(what, exact.difference(found, fresh), self.dtype)]
        if theirs is not None and not report.runs:
            dtype = mx.float32 if self.dtype == "float32" else None
            difference = exact.difference(found, theirs.logits(ids, dtype=dtype))
            note = " computing in float32" if dtype is not None else ""
            lines.append(exact.hold_others(f"logits against mlx-lm{note}", difference, self.dtype))
        for line in lines:
            self.say(line)
        report.exact += lines

    def _measure(
        self, ours: Ours, theirs: MlxLm | None, card: Card, budget: str, context: int
    ) -> Run:
        options, model = self.options, ours.model
        stream = Stream.random(
            batch=options.batch_size,
            prompt=context,
            following=options.generation_tokens,
            vocabulary=model.config.vocab_size,
            seed=options.seed,
        )
        self.say("Running warmup..")
        routing = follow(model.store, lambda: run(ours, stream))
        if theirs is not None:
            run(theirs, stream)
        prompt_tokens, generation_tokens = context, options.generation_tokens
        batch_size = options.batch_size
        self.say(f"Timing with {prompt_tokens=}, {generation_tokens=}, {batch_size=}.")
        found: list[tuple[Timing, Timing | None]] = []
        accounts: list[Account] = []
        for i in range(options.trials):
            if options.delay:
                time.sleep(options.delay)
            timing, account = self._trial(ours, theirs, stream)
            accounts.append(account)
            self.say(_line(f"Trial {i + 1}: ", timing))
            other = None
            if theirs is not None:
                other = run(theirs, stream, others_hold=ours.held_bytes)
                self.say(_line(f"mlx-lm  {i + 1}: ", other))
            found.append((timing, other))
        self.say(_averages([mine for mine, _ in found]))
        result = self._result(ours, card, routing, budget, stream, found)
        if not model.plan.resident:
            result.streaming = self._streaming(ours, routing, accounts)
            if result.streaming.state == "cold":
                hit_rate, distinct = result.streaming.hit_rate, routing.distinct_per_step()
                limit = card.disk_limit(hit_rate, batch=batch_size, distinct=distinct)
                result.limit_tps = min(result.limit_tps, limit)
        for line in run_lines(result):
            self.say(line)
        if options.capture is not None:
            with gpu_capture(model, **options.capture):
                run(ours, stream)
        if options.profile:
            result.profile = self._profile(ours, stream)
        return result

    def _profile(self, ours: Ours, stream: Stream) -> dict[str, Any]:
        """Stages of one sequence's prompt and steps, then of batched ones."""
        vocabulary = ours.model.config.vocab_size
        batch = max(self.options.batch_size, PROFILED_BATCH)
        batched = Stream.random(
            batch=batch, prompt=4, following=PROFILED_STEPS, vocabulary=vocabulary, seed=1
        )
        with Profiler(ours.model) as profiler:
            run(ours, Stream(stream.prompt[:1], stream.following[:1, : PROFILED_STEPS + 1]))
            run(ours, batched)
        self.say(profiler.table())
        if self.options.trace is not None:
            profiler.write_trace(self.options.trace)
        return profiler.as_dict()

    def _trial(self, ours: Ours, theirs: MlxLm | None, stream: Stream) -> tuple[Timing, Account]:
        streams, cold, between = not ours.model.plan.resident, self.options.cold, None
        if cold and streams:
            pages.evict(self.files)
            if ours.model.store.reader.name != "direct":
                between = partial(pages.evict, self.files)
        cached = pages.cached_share(self.files) if streams else None
        account = Account(ours.model.store.stats(), cached=cached)
        timing = run(
            ours,
            stream,
            others_hold=0 if theirs is None else theirs.held_bytes,
            at_first_token=account.first_token,
            between=between,
        )
        account.end()
        return timing, account

    def _result(
        self,
        ours: Ours,
        card: Card,
        routing: Routing,
        budget: str,
        stream: Stream,
        found: list[tuple[Timing, Timing | None]],
    ) -> Run:
        batch, context = stream.prompt.shape
        generation, plan = stream.following.shape[1], ours.model.plan
        distinct = routing.distinct_per_step()
        middle = context + generation // 2
        result = Run(
            expert_memory=budget,
            budget_bytes=plan.budget_bytes,
            resident=plan.resident,
            context=context,
            generation=generation,
            batch=batch,
            limit_tps=card.memory_limit(middle, batch=batch, distinct=distinct),
            distinct=distinct,
            ours=Speeds.of([mine for mine, _ in found]),
        )
        pairs = [(mine, other) for mine, other in found if other is not None]
        if pairs:
            result.theirs = Speeds.of([other for _, other in pairs])
            result.ratios = {
                name: Spread.of([getattr(m, name) / getattr(o, name) for m, o in pairs])
                for name in ("prompt_tps", "generation_tps")
            }
        return result

    def _streaming(self, ours: Ours, routing: Routing, accounts: list[Account]) -> Streaming:
        slots, experts = ours.model.store.slots, ours.model.config.num_experts
        steps = self.options.generation_tokens - 1
        totals = [account.decode.total for account in accounts]
        shares = [a.from_disk for a in accounts if a.from_disk is not None]
        return Streaming(
            hit_rate=float(np.median([total.hit_rate for total in totals])),
            shuffled=routing.shuffled_hit_rate(slots, seed=self.options.seed),
            missed=float(np.median([total.bytes_read / steps for total in totals])),
            stall=float(np.median([total.stall_seconds / steps for total in totals])),
            sync=sum(count < experts for count in slots.values()),
            from_disk=float(np.median(shares)) if len(shares) == len(accounts) else None,
            state=cache_state(accounts, cold=self.options.cold),
        )


def _averages(timings: list[Timing]) -> str:
    means = {
        "prompt_tps": np.mean([t.prompt_tps for t in timings]),
        "generation_tps": np.mean([t.generation_tps for t in timings]),
        "peak_memory": np.mean([t.peak_bytes / 1e9 for t in timings]),
    }
    return "Averages: " + ", ".join(f"{name}={mean:.3f}" for name, mean in means.items())


def _line(title: str, timing: Timing) -> str:
    total = timing.prompt_seconds + timing.decode_seconds
    return (
        f"{title} prompt_tps={timing.prompt_tps:.3f}, generation_tps={timing.generation_tps:.3f}, "
        f"peak_memory={timing.peak_bytes / 1e9:.3f}, total_time={total:.3f}"
    )

"""The benchmark: card, exactness, then timed pairs at every budget and context.

The trials of loaded budgets and of the other program alternate.
"""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_moeflux._version import __version__
from mlx_moeflux.backend import describe_backend
from mlx_moeflux.checkpoint.files import uncached
from mlx_moeflux.checkpoint.source import open_checkpoint
from mlx_moeflux.errors import InputError
from mlx_moeflux.experts.budget import measure_memory, parse_budget
from mlx_moeflux.experts.io.readers import make_reader
from mlx_moeflux.kernels.registry import choose_kernels
from mlx_moeflux.kernels.runtime import device
from mlx_moeflux.loading import load_model
from mlx_moeflux.measure.benchmark import exact, pages
from mlx_moeflux.measure.benchmark.card import Card, make_card, memory_bandwidth
from mlx_moeflux.measure.benchmark.exact import OurParts, TheirParts, compare_layers
from mlx_moeflux.measure.benchmark.pages import Account, cache_state
from mlx_moeflux.measure.benchmark.report import (
    BesideResident,
    Report,
    Run,
    Speeds,
    Spread,
    Streaming,
    run_lines,
)
from mlx_moeflux.measure.benchmark.routing import follow
from mlx_moeflux.measure.benchmark.sides import (
    MlxLm,
    Ours,
    Side,
    Stream,
    Timing,
    held_memory,
    run,
)
from mlx_moeflux.measure.disk import disk_bandwidth, expert_files
from mlx_moeflux.measure.profile.capture import check_capture, gpu_capture
from mlx_moeflux.measure.profile.stages import Profiler
from mlx_moeflux.models import map_checkpoint
from mlx_moeflux.models.weights import default_dtype

# Of a prompt, and sequences of a batch; seconds between trials.
MOST_TOKENS, MOST_DELAY = 1 << 24, 86_400


@dataclass(frozen=True)
class Options:
    """Options of a benchmark.

    expert_memory: Budgets.
    contexts: Prompt lengths.
    batch_sizes: Sequences. All are swept.
    compare: "mlx-lm" or None.
    cold: Empty the page cache and the banks before every trial, and the page cache after every
        token; where it cannot be emptied, pass it by. See :func:`.pages.cold_reads`.
    profile: Time the stages of a prompt, decode steps and batched steps after the trials.
    trace: A file for its slices.
    capture: Options of :func:`~mlx_moeflux.measure.profile.capture.gpu_capture` for one more run.
    load: More options of :func:`~mlx_moeflux.loading.load_model`.
    """

    expert_memory: tuple[str, ...] = ("auto",)
    contexts: tuple[int, ...] = (512,)
    generation_tokens: int = 1024
    batch_sizes: tuple[int, ...] = (1,)
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
        for name, least in (("trials", 1), ("generation_tokens", 2)):
            if getattr(self, name) < least:
                raise InputError(f"{name} is {getattr(self, name)}; it must be at least {least}.")
        for name in ("contexts", "batch_sizes"):
            if min(getattr(self, name)) < 1:
                raise InputError(f"{name} has {min(getattr(self, name))}; give at least 1.")
            if max(getattr(self, name)) > MOST_TOKENS:
                raise InputError(f"{name} has more than {MOST_TOKENS}; give fewer.")
        if not 0 <= self.delay <= MOST_DELAY:
            raise InputError(f"delay is {self.delay} s; give 0 to {MOST_DELAY}.")
        if self.prefill_step_size is not None and self.prefill_step_size < 1:
            raise InputError(f"prefill_step_size is {self.prefill_step_size}; give at least 1.")
        if self.compare not in (None, "mlx-lm"):
            raise InputError(f"there is no comparison with '{self.compare}'; give mlx-lm.")
        if self.compare and "experts_per_token" in self.load:
            raise InputError("with fewer experts a token there is nothing to compare with.")
        if self.capture is not None:
            check_capture(self.capture["file"])
        if self.cold and not pages.can_evict():
            fills = "mlx-lm" if self.compare else "the reader 'mmap'"
            if self.compare or self.reader == "mmap":
                raise InputError(
                    f"{fills} reads through the page cache, which this system cannot empty; leave "
                    "it or --cold out."
                )


Say = Callable[[str], None]

CHECKED_SEQUENCES = 4
"""Of a batch, as many are checked for exactness."""

MOST_CHECKED = 2048
"""Tokens of a prompt that another program's layers are checked with."""


def machine() -> str:
    """The machine in general words: ``2-core x86_64 CPU``, or the GPU's name."""
    if device.kind() == "cpu":
        return f"{os.cpu_count()}-core {platform.machine()} CPU"
    return str(mx.device_info(mx.gpu).get("device_name", "unknown GPU"))


def benchmark(
    directory: Path,
    options: Options,
    *,
    name: str | None = None,
    command: str = "",
    say: Say = lambda line: None,
) -> Report:
    """Measure a checkpoint.

    name, command: For the report: the model's name, and how this was called. say: Called with
    each line of progress, in mlx-lm's words where it has them.

    Raises:
        ExactnessError: Results are wrong; nothing was timed.
        MoefluxError: Another kind: an option, the checkpoint, the memory.
    """
    options.check()
    with uncached() if options.cold else nullcontext():
        bench = _Bench(Path(directory), options, say)
        return bench.report(name or Path(directory).name, command)


class _Bench:
    """The state that all runs of one benchmark share."""

    def __init__(self, directory: Path, options: Options, say: Say):
        self.directory, self.options, self.say = directory, options, say
        self.mapped = map_checkpoint(open_checkpoint(directory))
        self.files = expert_files(self.mapped.experts)
        self.dtype = str(options.load.get("dtype") or default_dtype()).removeprefix("mlx.core.")
        self.longest = max(options.contexts) + options.generation_tokens

    def report(self, name: str, command: str) -> Report:
        options = self.options
        memory = memory_bandwidth()
        disk = disk_bandwidth(self.mapped.experts, threads=options.threads, seed=options.seed)
        report = Report(
            model=name,
            machine=machine(),
            versions={"mlx_moeflux": __version__, "backend": describe_backend()},
            card={},
            exact=[],
            command=command,
            options=options.as_dict(),
            page_cache=pages.cold_reads().note if options.cold else "",
        )
        if report.page_cache:
            self.say(report.page_cache)
        with ExitStack() as stack:
            theirs = None
            if options.compare:
                theirs = MlxLm(self.directory, prefill_step_size=options.prefill_step_size)
                stack.callback(theirs.close)
                report.versions["mlx-lm"] = version("mlx-lm")
            expected = self._expected()
            for budgets in self._groups():
                self._measure(budgets, theirs, expected, report, memory=memory, disk=disk)
        peak = pages.peak_process_bytes()
        report.peak_process = None if peak is None else peak / 1e9
        return report

    def _groups(self) -> list[tuple[str, ...]]:
        """Return groups of budgets that are loaded together, so that their trials alternate: one
        group if all fit."""
        budgets, options = self.options.expert_memory, self.options
        experts = sum(
            len(refs) * refs[0].nbytes
            for components in self.mapped.experts.values()
            for refs in components.values()
        )
        trunk = sum(tensor.nbytes for tensor in self.mapped.trunk.values())
        needs = [parse_budget(budget, experts) or experts for budget in budgets]
        need = sum(min(need, experts) + 2 * trunk for need in needs)
        need += (experts + trunk) * (options.compare is not None)
        if need <= measure_memory().usable_bytes:
            return [budgets]
        self.say("not all budgets fit at once: their trials do not take turns")
        return [(budget,) for budget in budgets]

    def _measure(
        self,
        budgets: Sequence[str],
        theirs: MlxLm | None,
        expected: tuple[np.ndarray, np.ndarray],
        report: Report,
        *,
        memory: float,
        disk: float | None,
    ) -> None:
        """Load `budgets`, check them, and add their runs to the report."""
        options, measurements = self.options, []
        with ExitStack() as stack:
            for budget in budgets:
                ours = stack.enter_context(self._ours(budget))
                card = make_card(ours.model, memory=memory, disk=disk)
                if not report.card:
                    for line in card.lines(self.longest):
                        self.say(line)
                    report.card = card.as_dict(self.longest)
                first = not report.exact
                self._check(ours, theirs if first else None, expected, budget, report)
                for line in ours.model.store.stats().lossy:
                    self.say(f"lossy: {line}")
                measurements.append(Measurement(budget, ours, card, options, self.files))
            for context, batch in product(options.contexts, options.batch_sizes):
                stream = Stream.random(
                    batch=batch,
                    prompt=context,
                    following=options.generation_tokens,
                    vocabulary=ours.model.config.vocab_size,
                    seed=options.seed,
                )
                found = measure_case(measurements, theirs, stream, options, self.say)
                report.runs += found
                beside_resident(report.runs, disk)
                for one, measurement in zip(found, measurements, strict=True):
                    if len(budgets) > 1:
                        self.say(f"-- experts {one.expert_memory}")
                    for line in run_lines(one):
                        self.say(line)
                    measurement.look(self.say)

    @contextmanager
    def _ours(self, budget: str, **more: Any) -> Iterator[Ours]:
        before, options = held_memory(), self.options
        load: dict[str, Any] = {"expert_memory": budget, "expert_reader": options.reader}
        load |= options.load | more
        model = load_model(self.directory, expert_threads=options.threads, **load)
        with model:
            if model.plan is not None:
                self.say(str(model.plan))
                streaming = model.store.streaming
                if streaming is not None and streaming.timed_budget is not None:
                    # A budget that is set does not change during the measurements.
                    model.set_expert_memory(model.plan.budget_bytes)
            held = held_memory() - before
            yield Ours(model, prefill_step_size=options.prefill_step_size, held_bytes=held)
        mx.clear_cache()

    def _check_ids(self, vocabulary: int, prompt: int = exact.PREFILL_TOKENS) -> np.ndarray:
        """Random ids ``[B, T]``; B is 1 for a prompt of another length."""
        random = np.random.default_rng(self.options.seed + 1)
        batch = min(max(self.options.batch_sizes), CHECKED_SEQUENCES)
        shape = (batch if prompt == exact.PREFILL_TOKENS else 1, prompt + exact.DECODE_TOKENS)
        return random.integers(0, vocabulary, shape).astype(np.int32)

    @contextmanager
    def _fresh(self) -> Iterator[Ours]:
        """The model whose experts are read anew on every call, all in this process."""
        given = {k: v for k, v in self.options.load.items() if k in ("kernels", "check_values")}
        kernels = choose_kernels(given.pop("kernels", None), **given)
        reader = make_reader("auto", self.mapped.experts)
        store = exact.FreshStore(reader, mix=kernels.expert_mix)
        with self._ours("auto", store=store, distributed=None) as fresh:
            yield fresh

    def _expected(self) -> tuple[np.ndarray, np.ndarray]:
        """Ids and the fresh model's logits."""
        with self._fresh() as fresh:
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
        report.exact.append(self._same(what, ours, ids, exact.difference(found, fresh)))
        self.say(report.exact[-1])
        if theirs is not None:
            report.exact.append(self._others(ours, theirs, ids, found))
            self.say(report.exact[-1])

    def _same(self, what: str, ours: Ours, ids: np.ndarray, found: exact.Difference) -> str:
        if found.same or self.dtype == "float32":
            return exact.hold(what, found, exact.SAME)
        with self._fresh() as fresh:
            return compare_layers(
                what, OurParts(ours.model), OurParts(fresh.model), ids, **self._layered
            )

    def _others(self, ours: Ours, theirs: MlxLm, ids: np.ndarray, found: np.ndarray) -> str:
        if self.dtype == "float32":
            difference = exact.difference(found, theirs.logits(ids, dtype=mx.float32))
            return exact.hold(
                "logits against mlx-lm computing in float32", difference, exact.limit("float32")
            )
        if device.kind() != "cpu":
            # MLX on NVIDIA compiles its products of quantised matrices for every class of lengths,
            # for minutes in all: those of the prompt that is measured are needed anyway.
            length = min(MOST_CHECKED, *self.options.contexts)
            ids = self._check_ids(ours.model.config.vocab_size, length)
        parts = OurParts(ours.model), TheirParts(theirs.model)
        return compare_layers("against mlx-lm", *parts, ids, **self._layered)

    @property
    def _layered(self) -> dict[str, Any]:
        return {"decode": exact.DECODE_TOKENS, "dtype": self.dtype}


PROFILED_STEPS, PROFILED_BATCH = 16, 8


def measure_case(
    measurements: Sequence[Measurement],
    theirs: MlxLm | None,
    stream: Stream,
    options: Options,
    say: Callable[[str], None],
) -> list[Run]:
    """Trials of every loaded budget and of the other program, in turns; a result for each budget.

    say: Called with mlx-lm's lines.
    """
    say("Running warmup..")
    for measurement in measurements:
        measurement.warm_up(stream)
    if theirs is not None:
        run(theirs, stream)
    batch, context = stream.prompt.shape
    say(
        f"Timing with prompt_tokens={context}, generation_tokens={options.generation_tokens}, "
        f"batch_size={batch}."
    )
    several, others = len(measurements) > 1, []
    refills = several or theirs is not None
    for i in range(options.trials):
        if options.delay:
            time.sleep(options.delay)
        # No side always follows the same one.
        turn = i % len(measurements)
        for measurement in [*measurements[turn:], *measurements[:turn]]:
            title = f"Trial {i + 1}" + (f" {measurement.budget}" if several else "")
            say(_line(title, measurement.trial(refill=refills)))
        if theirs is not None:
            refill_cache(theirs, stream)
            others.append(run(theirs, stream))
            say(_line(f"mlx-lm  {i + 1}", others[-1]))
    return [measurement.result(others) for measurement in measurements]


def refill_cache(side: Side, stream: Stream) -> None:
    """On GPUs all programs share MLX's cache of freed buffers, and each would pay for allocating
    what the others made it drop: a prompt off the clock brings them back."""
    if device.kind() != "cpu":
        run(side, Stream(stream.prompt, stream.following[:, :2]))


class Measurement:
    """One loaded budget: its trials of one stream after another."""

    def __init__(
        self, budget: str, ours: Ours, card: Card, options: Options, files: Sequence[Path]
    ):
        self.budget, self.ours, self.card = budget, ours, card
        self.options, self.files = options, files
        self.streams = not ours.model.plan.resident

    def warm_up(self, stream: Stream) -> None:
        """One run that listens to the routers, and forget earlier trials."""
        self._stream, self._timings, self._accounts = stream, [], []
        self._routing = follow(self.ours.model.store, lambda: run(self.ours, stream))

    def trial(self, *, refill: bool) -> Timing:
        """One run on the clock; refill: Others ran since the last one."""
        store, between = self.ours.model.store, None
        if refill:
            refill_cache(self.ours, self._stream)
        if self.options.cold and self.streams:
            for layer, slots in store.streaming.slots.items():
                store.streaming.resize(layer, 1)
                store.streaming.resize(layer, slots)
            pages.evict(self.files)
            if store.streaming.reader.name != "direct":
                between = self._evict
        cached = pages.cached_share(self.files) if self.streams else None
        account = Account(store.stats(), cached=cached)
        timing = run(self.ours, self._stream, at_first_token=account.first_token, between=between)
        account.end()
        self._timings.append(timing)
        self._accounts.append(account)
        return timing

    def _evict(self) -> None:
        pages.evict(self.files)

    def result(self, others: Sequence[Timing]) -> Run:
        """Summarise the trials beside those of the other program in the same rounds."""
        result = self._result(others)
        if self.streams:
            self._add_streaming(result)
        self._last = result
        return result

    def look(self, say: Callable[[str], None]) -> None:
        """Run the last case once more to capture or profile it, if the options say so."""
        stream, options, model = self._stream, self.options, self.ours.model
        if options.capture is not None:
            with gpu_capture(model, **options.capture):
                run(self.ours, Stream(stream.prompt[:1], stream.following[:1]))
        if not options.profile:
            return
        batched = Stream.random(
            batch=max(self._last.batch, PROFILED_BATCH),
            prompt=4,
            following=PROFILED_STEPS,
            vocabulary=model.config.vocab_size,
            seed=options.seed,
        )
        with Profiler(model) as profiler:
            following = stream.following[:1, : PROFILED_STEPS + 1]
            run(self.ours, Stream(stream.prompt[:1], following))
            run(self.ours, batched)
        say(f"stages, experts {self.budget}:")
        say(profiler.table())
        if options.trace is not None:
            profiler.write_trace(options.trace)
        self._last.profile = profiler.as_dict()

    def _result(self, others: Sequence[Timing]) -> Run:
        batch, context = self._stream.prompt.shape
        generation, plan = self._stream.following.shape[1], self.ours.model.plan
        distinct = self._routing.distinct_per_step()
        middle = context + generation // 2
        result = Run(
            expert_memory=self.budget,
            budget_bytes=plan.budget_bytes,
            resident=plan.resident,
            context=context,
            generation=generation,
            batch=batch,
            limit_tps=self.card.memory_limit(middle, batch=batch, distinct=distinct),
            distinct=distinct,
            skew=self._routing.skew(self.card.experts, seed=self.options.seed),
            ours=Speeds.of(self._timings),
        )
        if others:
            result.theirs = Speeds.of(others)
            pairs = list(zip(self._timings, others, strict=True))
            result.ratios = {
                name: Spread.of([getattr(m, name) / getattr(o, name) for m, o in pairs])
                for name in ("prompt_tps", "generation_tps")
            }
        return result

    def _add_streaming(self, result: Run) -> None:
        model = self.ours.model
        slots, experts = model.store.streaming.slots, model.config.num_experts
        accounts, steps = self._accounts, result.generation - 1
        decode = [account.decode.total for account in accounts]
        shares = [a.from_disk for a in accounts if a.from_disk is not None]
        result.streaming = Streaming(
            hit_rate=float(np.median([total.hit_rate for total in decode])),
            shuffled=self._routing.shuffled_hit_rate(slots, seed=self.options.seed),
            missed=float(np.median([total.bytes_read / steps for total in decode])),
            stall=float(np.median([total.stall_seconds / steps for total in decode])),
            prompt_read=float(np.median([a.prompt.total.bytes_read for a in accounts])),
            sync=sum(count < experts for count in slots.values()),
            from_disk=float(np.median(shares)) if len(shares) == len(accounts) else None,
            state=cache_state(accounts, cold=self.options.cold),
        )
        if result.streaming.state == "cold":
            limit = self.card.disk_limit(
                result.streaming.hit_rate, batch=result.batch, distinct=result.distinct
            )
            result.limit_tps = min(result.limit_tps, limit)


def beside_resident(runs: Sequence[Run], disk: float | None) -> None:
    """Compare what streams with what is resident in the same case."""
    resident = {(one.context, one.batch): one for one in runs if one.resident}
    for one in runs:
        base = resident.get((one.context, one.batch))
        if one.streaming is not None and base is not None:
            one.beside_resident = _beside(one, base, disk)


def _beside(streamed: Run, resident: Run, disk: float | None) -> BesideResident:
    missed = 0.0 if streamed.streaming is None else streamed.streaming.missed
    step, base = (r.batch / r.ours.generation_tps.median for r in (streamed, resident))
    return BesideResident(
        speed=base / step,
        seconds_more=step - base,
        disk_seconds=missed / disk if disk else None,
        prompt_speed=streamed.ours.prompt_tps.median / resident.ours.prompt_tps.median,
    )


def _line(title: str, timing: Timing) -> str:
    total = timing.prompt_seconds + timing.decode_seconds
    return (
        f"{title}:  prompt_tps={timing.prompt_tps:.3f}, "
        f"generation_tps={timing.generation_tps:.3f}, "
        f"peak_memory={timing.peak_bytes / 1e9:.3f}, total_time={total:.3f}"
    )

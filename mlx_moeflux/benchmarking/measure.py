"""Loaded budgets on the clock, in turns with each other and with the other program."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import mlx.core as mx
import numpy as np

from mlx_moeflux.benchmarking import pages
from mlx_moeflux.benchmarking.account import Account, cache_state
from mlx_moeflux.benchmarking.card import Card
from mlx_moeflux.benchmarking.options import Options
from mlx_moeflux.benchmarking.results import BesideResident, Run, Speeds, Spread, Streaming
from mlx_moeflux.benchmarking.routing import follow
from mlx_moeflux.benchmarking.sides import MlxLm, Ours, Side, Stream, Timing, run
from mlx_moeflux.profiling.capture import gpu_capture
from mlx_moeflux.profiling.stages import Profiler

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
        # Nobody always follows the same one.
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
    if mx.default_device() != mx.cpu:
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
            for layer, slots in store.slots.items():
                store.resize(layer, 1)
                store.resize(layer, slots)
            pages.evict(self.files)
            if store.reader.name != "direct":
                between = partial(pages.evict, self.files)
        cached = pages.cached_share(self.files) if self.streams else None
        account = Account(store.stats(), cached=cached)
        timing = run(self.ours, self._stream, at_first_token=account.first_token, between=between)
        account.end()
        self._timings.append(timing)
        self._accounts.append(account)
        return timing

    def result(self, others: Sequence[Timing]) -> Run:
        """What the trials come to, beside the other program's of the same rounds."""
        result = self._result(others)
        if self.streams:
            self._add_streaming(result)
        self._last = result
        return result

    def look(self, say: Callable[[str], None]) -> None:
        """Capture and profile the last case once more, if that was asked for."""
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
        slots, experts = self.ours.model.store.slots, self.ours.model.config.num_experts
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
    step, base = (r.batch / r.ours.generation_tps.median for r in (streamed, resident))
    return BesideResident(
        speed=base / step,
        seconds_more=step - base,
        disk_seconds=streamed.streaming.missed / disk if disk else None,
        prompt_speed=streamed.ours.prompt_tps.median / resident.ours.prompt_tps.median,
    )


def _line(title: str, timing: Timing) -> str:
    total = timing.prompt_seconds + timing.decode_seconds
    return (
        f"{title}:  prompt_tps={timing.prompt_tps:.3f}, "
        f"generation_tps={timing.generation_tps:.3f}, "
        f"peak_memory={timing.peak_bytes / 1e9:.3f}, total_time={total:.3f}"
    )

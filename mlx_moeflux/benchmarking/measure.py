"""One loaded budget on the clock: trials in turns with the other program, and what they come to."""

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
from mlx_moeflux.benchmarking.routing import Routing, follow
from mlx_moeflux.benchmarking.sides import MlxLm, Ours, Side, Stream, Timing, run
from mlx_moeflux.profiling.capture import gpu_capture
from mlx_moeflux.profiling.stages import Profiler

PROFILED_STEPS, PROFILED_BATCH = 16, 8

Pair = tuple[Timing, Timing | None]


class Measurement:
    """Runs of one loaded model beside another program's; `say` gets mlx-lm's lines."""

    def __init__(
        self,
        options: Options,
        files: Sequence[Path],
        ours: Ours,
        theirs: MlxLm | None,
        card: Card,
        say: Callable[[str], None],
    ):
        self.options, self.files, self.card, self.say = options, files, card, say
        self.ours, self.theirs = ours, theirs
        self.streams = not ours.model.plan.resident
        self._last: tuple[Run, Stream] | None = None

    def run(self, budget: str, context: int, batch: int) -> Run:
        """All trials of one context and batch; budget: Its name in the result."""
        options = self.options
        stream = Stream.random(
            batch=batch,
            prompt=context,
            following=options.generation_tokens,
            vocabulary=self.ours.model.config.vocab_size,
            seed=options.seed,
        )
        self.say("Running warmup..")
        routing = follow(self.ours.model.store, lambda: run(self.ours, stream))
        if self.theirs is not None:
            run(self.theirs, stream)
        self.say(
            f"Timing with prompt_tokens={context}, "
            f"generation_tokens={options.generation_tokens}, batch_size={batch}."
        )
        pairs: list[Pair] = []
        accounts: list[Account] = []
        for i in range(options.trials):
            if options.delay:
                time.sleep(options.delay)
            mine, account = self._trial(stream)
            accounts.append(account)
            self.say(_line(f"Trial {i + 1}: ", mine))
            other = None
            if self.theirs is not None:
                self._refill(self.theirs, stream)
                other = run(self.theirs, stream, others_hold=self.ours.held_bytes)
                self.say(_line(f"mlx-lm  {i + 1}: ", other))
            pairs.append((mine, other))
        self.say(_averages([mine for mine, _ in pairs]))
        result = self._result(budget, stream, routing, pairs)
        if self.streams:
            self._add_streaming(result, routing, accounts)
        self._last = result, stream
        return result

    def look(self) -> None:
        """Capture and profile the last run's case once more, if that was asked for."""
        (result, stream), options, model = self._last, self.options, self.ours.model
        if options.capture is not None:
            with gpu_capture(model, **options.capture):
                run(self.ours, Stream(stream.prompt[:1], stream.following[:1]))
        if not options.profile:
            return
        batch = max(result.batch, PROFILED_BATCH)
        batched = Stream.random(
            batch=batch,
            prompt=4,
            following=PROFILED_STEPS,
            vocabulary=model.config.vocab_size,
            seed=options.seed,
        )
        with Profiler(model) as profiler:
            following = stream.following[:1, : PROFILED_STEPS + 1]
            run(self.ours, Stream(stream.prompt[:1], following))
            run(self.ours, batched)
        self.say(profiler.table())
        if options.trace is not None:
            profiler.write_trace(options.trace)
        result.profile = profiler.as_dict()

    def _refill(self, side: Side, stream: Stream) -> None:
        """On GPUs both programs share MLX's cache of freed buffers, and each would pay for
        allocating what the other made it drop: a prompt off the clock brings them back."""
        if self.theirs is not None and mx.default_device() != mx.cpu:
            run(side, Stream(stream.prompt, stream.following[:, :2]))

    def _trial(self, stream: Stream) -> tuple[Timing, Account]:
        store, between = self.ours.model.store, None
        self._refill(self.ours, stream)
        if self.options.cold and self.streams:
            for layer, slots in store.slots.items():
                store.resize(layer, 1)
                store.resize(layer, slots)
            pages.evict(self.files)
            if store.reader.name != "direct":
                between = partial(pages.evict, self.files)
        cached = pages.cached_share(self.files) if self.streams else None
        account = Account(store.stats(), cached=cached)
        timing = run(
            self.ours,
            stream,
            others_hold=0 if self.theirs is None else self.theirs.held_bytes,
            at_first_token=account.first_token,
            between=between,
        )
        account.end()
        return timing, account

    def _result(self, budget: str, stream: Stream, routing: Routing, found: list[Pair]) -> Run:
        batch, context = stream.prompt.shape
        generation, plan = stream.following.shape[1], self.ours.model.plan
        distinct = routing.distinct_per_step()
        middle = context + generation // 2
        result = Run(
            expert_memory=budget,
            budget_bytes=plan.budget_bytes,
            resident=plan.resident,
            context=context,
            generation=generation,
            batch=batch,
            limit_tps=self.card.memory_limit(middle, batch=batch, distinct=distinct),
            distinct=distinct,
            skew=routing.skew(self.card.experts, seed=self.options.seed),
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

    def _add_streaming(self, result: Run, routing: Routing, accounts: list[Account]) -> None:
        slots, experts = self.ours.model.store.slots, self.ours.model.config.num_experts
        steps = result.generation - 1
        decode = [account.decode.total for account in accounts]
        shares = [a.from_disk for a in accounts if a.from_disk is not None]
        result.streaming = Streaming(
            hit_rate=float(np.median([total.hit_rate for total in decode])),
            shuffled=routing.shuffled_hit_rate(slots, seed=self.options.seed),
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
    """Compare the last of `runs`, if it streams, with a resident one of the same case."""
    last = runs[-1]
    alike = (
        r for r in runs if (r.resident, r.context, r.batch) == (True, last.context, last.batch)
    )
    resident = next(alike, None)
    if last.streaming is None or resident is None:
        return
    step, base = (r.batch / r.ours.generation_tps.median for r in (last, resident))
    last.beside_resident = BesideResident(
        speed=base / step,
        seconds_more=step - base,
        disk_seconds=last.streaming.missed / disk if disk else None,
        prompt_speed=last.ours.prompt_tps.median / resident.ours.prompt_tps.median,
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

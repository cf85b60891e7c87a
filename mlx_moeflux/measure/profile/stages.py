"""Seconds by stage: attention, delta net, router, experts, shared expert, head, host, I/O.

    with Profiler(model) as profiler:
        mlx_moeflux.generate(model, tokenizer, "def", max_tokens=32)
    print(profiler.table())
    profiler.write_trace("trace.json")

While it runs every stage is evaluated before the next begins, compiled functions run as written,
and nothing is prepared ahead: stages add up, but the whole is slower than without it. Outside of
the ``with`` nothing is changed and nothing costs anything.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NamedTuple

from mlx_moeflux.checkpoint.files import write_output
from mlx_moeflux.errors import InputError
from mlx_moeflux.experts.io.replicas import each_reader
from mlx_moeflux.experts.telemetry.stats import LayerStats
from mlx_moeflux.measure.profile.instrument import Retyped, evaluate, uncompiled
from mlx_moeflux.models.decoder import DecoderModel
from mlx_moeflux.models.moe import SparseMoeBlock

# Attribute of a layer, or method of its MoE block -> stage. What comes before the experts is norm,
# router and the shared expert's first products in one; what comes after is its last product.
LAYER_STAGES = {"self_attn": "attention", "linear_attn": "delta net"}
BLOCK_STAGES = {"project_inputs": "router", "combine": "shared"}
STAGES = (
    "attention",
    "delta net",
    "router",
    "experts",
    "stall",
    "shared",
    "dense",
    "head",
    "other",
    "host",
)
"""experts: computing, without `stall`, which is waiting for reads. dense: feed-forward of layers
without experts. other: norms, residuals, embedding, the combination. host: between two calls of
the model: sampling, text, the caller."""

MAX_SLICES = 500_000
"""What a trace keeps: some 2 MB for each 10,000."""


@dataclass
class StageTime:
    """seconds: Until the stage's results were there. building: The part of it spent in Python,
    before anything was waited for."""

    seconds: float = 0.0
    building: float = 0.0


class Slice(NamedTuple):
    """One bar of the trace."""

    name: str
    start: float
    seconds: float
    thread: str
    details: dict[str, Any]


class Phase:
    """The account of one kind of call: prefill, decode, or a batched step."""

    def __init__(self):
        self.calls, self.tokens = 0, 0
        self.stages: dict[str, StageTime] = {stage: StageTime() for stage in STAGES}
        self.bytes_read, self.read_seconds = 0, 0.0

    @property
    def seconds(self) -> float:
        """All stages together."""
        return sum(stage.seconds for stage in self.stages.values())


class Profiler:
    """Times the stages of one model, in one thread, while it is entered.

    phases: "prefill", "decode", "batch of B" -> :class:`Phase`. slices: For the trace.
    """

    def __init__(self, model: DecoderModel):
        self._model, self._exits = model, None
        self.reset()

    def reset(self) -> None:
        """Forget what was measured so far."""
        self.phases: dict[str, Phase] = {}
        self.slices: list[Slice] = []
        self.dropped = 0
        self._phase: Phase | None = None
        self._layer: int | None = None
        self._inside = False
        self._ended: float | None = None
        self._began = perf_counter()

    def __enter__(self) -> Profiler:
        if self._exits is not None:
            raise InputError("this profiler is entered already; make another.")
        with ExitStack() as exits:
            exits.enter_context(uncompiled())
            # Segments between routers would not ask the blocks' stores.
            exits.callback(setattr, self._model, "compile_steps", self._model.compile_steps)
            self._model.compile_steps = False
            watched = Retyped()
            exits.callback(watched.restore)
            self._instrument(watched, exits)
            self._exits = exits.pop_all()
        self._ended = None
        return self

    def __exit__(self, *exception: object) -> None:
        exits, self._exits = self._exits, None
        if exits is not None:
            exits.close()

    def _instrument(self, watched: Retyped, exits: ExitStack) -> None:
        model = self._model
        for index, layer in enumerate(model.layers):
            for name, stage in LAYER_STAGES.items():
                if name in layer:
                    watched.watch(layer[name], "__call__", self._timer(stage))
            block = layer.mlp
            if isinstance(block, SparseMoeBlock):
                self._instrument_block(block, watched, exits)
            else:
                watched.watch(block, "__call__", self._timer("dense"))
            watched.watch(layer, "__call__", self._in_layer(index))
        if "lm_head" in model:
            watched.watch(model.lm_head, "__call__", self._timer("head"))
        else:
            watched.watch(model.model.embed_tokens, "as_linear", self._timer("head"))
        watched.watch(model, "__call__", self._call)
        watched.watch(model.store, "experts", self._timer("experts"))
        if (streaming := model.store.streaming) is not None:
            for reader in each_reader(streaming.reader):
                watched.watch(reader, "read", self._read)

    def _instrument_block(self, block: Any, watched: Retyped, exits: ExitStack) -> None:
        for name, stage in BLOCK_STAGES.items():
            watched.watch(block, name, self._timer(stage))
        router = block._router
        block._router = _TimedRouter(router, self._timer("router"))
        exits.callback(setattr, block, "_router", router)

    def _call(self, original: Callable, arguments: tuple, options: dict) -> Any:
        """One call of the model."""
        evaluate(arguments, options)
        tokens = arguments[0]
        start, stats = perf_counter(), _total(self._model)
        phase = self._phase = self.phases.setdefault(_phase_name(tokens.shape), Phase())
        if self._ended is not None:
            phase.stages["host"].seconds += start - self._ended
        before = phase.seconds
        try:
            result = original(*arguments, **options)
            evaluate(result, arguments[1:], options)
        finally:
            self._phase = None
            end = self._ended = perf_counter()
        phase.calls += 1
        phase.tokens += tokens.size
        phase.stages["other"].seconds += end - start - (phase.seconds - before)
        now = _total(self._model)
        phase.bytes_read += now.bytes_read - stats.bytes_read
        phase.read_seconds += now.read_seconds - stats.read_seconds
        self._keep(_phase_name(tokens.shape), start, end, tokens=tokens.size)
        return result

    def _in_layer(self, index: int) -> Callable:
        def around(original: Callable, arguments: tuple, options: dict) -> Any:
            evaluate(arguments, options)
            start, self._layer = perf_counter(), index
            try:
                result = original(*arguments, **options)
                evaluate(result)
            finally:
                self._layer = None
            self._keep(f"layer {index}", start, perf_counter())
            return result

        return around

    def _timer(self, stage: str) -> Callable:
        def around(original: Callable, arguments: tuple, options: dict) -> Any:
            phase = self._phase
            if self._inside or phase is None:
                return original(*arguments, **options)
            evaluate(arguments, options)
            self._inside = True
            stalled = _total(self._model).stall_seconds
            start = perf_counter()
            try:
                result = original(*arguments, **options)
                built = perf_counter()
                evaluate(result, arguments, options)
            finally:
                self._inside = False
            end = perf_counter()
            stalled = _total(self._model).stall_seconds - stalled
            phase.stages["stall"].seconds += stalled
            phase.stages[stage].seconds += end - start - stalled
            phase.stages[stage].building += built - start - stalled
            self._keep(stage, start, end, layer=self._layer, stall_ms=1000 * stalled)
            return result

        return around

    def _read(self, original: Callable, arguments: tuple, options: dict) -> Any:
        """One block's read, in a thread of its own."""
        start = perf_counter()
        count = original(*arguments, **options)
        layer, expert = arguments[:2]
        self._keep("read", start, perf_counter(), layer=layer, expert=expert, bytes=count)
        return count

    def _keep(self, name: str, start: float, end: float, **details: Any) -> None:
        if len(self.slices) >= MAX_SLICES:
            self.dropped += 1
            return
        thread = threading.current_thread().name
        self.slices.append(Slice(name, start - self._began, end - start, thread, details))

    def as_dict(self) -> dict[str, Any]:
        """Phase -> calls, tokens, and milliseconds of a call by stage."""
        return {
            name: {
                "calls": phase.calls,
                "tokens": phase.tokens,
                "milliseconds": {
                    stage: 1000 * time.seconds / phase.calls for stage, time in phase.stages.items()
                },
                "building_milliseconds": {
                    stage: 1000 * time.building / phase.calls
                    for stage, time in phase.stages.items()
                },
                "bytes_read": phase.bytes_read / phase.calls,
                "read_milliseconds": 1000 * phase.read_seconds / phase.calls,
            }
            for name, phase in self.phases.items()
            if phase.calls
        }

    def table(self) -> str:
        """Milliseconds of a call by stage; in brackets the part that Python took to build it.

        I/O is summed over the threads; what the caller waited for is `stall`.
        """
        phases = {name: phase for name, phase in self.phases.items() if phase.calls}
        lines = [f"{'ms a call':13}" + "".join(f"{name:>30}" for name in phases)]
        for stage in STAGES:
            times = [phase.stages[stage] for phase in phases.values()]
            if not any(time.seconds for time in times):
                continue
            cells = (_cell(time, phase) for time, phase in zip(times, phases.values(), strict=True))
            lines.append(f"{stage:13}" + "".join(cells))
        rows = {
            "sum": lambda p: f"{1000 * p.seconds / p.calls:.3f}",
            "calls": lambda p: f"{p.calls}",
            "I/O, threads": lambda p: f"{1000 * p.read_seconds / p.calls:.3f}",
            "MB read": lambda p: f"{p.bytes_read / p.calls / 1e6:.3f}",
        }
        for title, cell in rows.items():
            lines.append(f"{title:13}" + "".join(f"{cell(p):>30}" for p in phases.values()))
        lines.append("stages are evaluated one by one: the sum is more than an unprofiled call")
        return "\n".join(lines)

    def trace(self) -> dict[str, Any]:
        """The slices as a Chrome trace (chrome://tracing, Perfetto): one row for each thread."""
        threads = {name: i for i, name in enumerate(dict.fromkeys(s.thread for s in self.slices))}
        names = [
            {"name": "thread_name", "ph": "M", "pid": 1, "tid": i, "args": {"name": name}}
            for name, i in threads.items()
        ]
        slices = [
            {
                "name": s.name,
                "ph": "X",
                "pid": 1,
                "tid": threads[s.thread],
                "ts": 1e6 * s.start,
                "dur": 1e6 * s.seconds,
                "args": s.details,
            }
            for s in self.slices
        ]
        return {
            "traceEvents": names + slices,
            "displayTimeUnit": "ms",
            "otherData": {"dropped_slices": self.dropped},
        }

    def write_trace(self, file: str | os.PathLike[str]) -> None:
        """Write :meth:`trace` as JSON; InputError if the file cannot be written."""
        write_output(file, json.dumps(self.trace()).encode())


class _TimedRouter:
    """A router that is timed; anything else is the router's own."""

    def __init__(self, router: Any, around: Callable):
        self._router, self._around = router, around

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._around(self._router, arguments, options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._router, name)


def _total(model: DecoderModel) -> LayerStats:
    return model.store.stats().total


def _phase_name(shape: tuple[int, ...]) -> str:
    B, T = shape
    if T > 1:
        return "prefill" if B == 1 else f"prefill of {B}"
    return "decode" if B == 1 else f"batch of {B}"


def _cell(time: StageTime, phase: Phase) -> str:
    share = 100 * time.seconds / phase.seconds
    milliseconds, building = (1000 * t / phase.calls for t in (time.seconds, time.building))
    return f"{milliseconds:11.3f} ({building:7.3f}) {share:5.1f} %  "

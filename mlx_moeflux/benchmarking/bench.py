"""The benchmark: card, exactness, then timed pairs at every budget and context."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_moeflux._version import __version__
from mlx_moeflux.backend import describe_backend
from mlx_moeflux.benchmarking import exact, pages
from mlx_moeflux.benchmarking.card import (
    disk_bandwidth,
    expert_files,
    make_card,
    memory_bandwidth,
)
from mlx_moeflux.benchmarking.layers import OurParts, TheirParts, compare_layers
from mlx_moeflux.benchmarking.measure import Measurement, beside_resident, measure_case
from mlx_moeflux.benchmarking.options import Options
from mlx_moeflux.benchmarking.report import run_lines
from mlx_moeflux.benchmarking.results import Report
from mlx_moeflux.benchmarking.sides import MlxLm, Ours, Stream, settled_memory
from mlx_moeflux.checkpoint.names import MappedTensors
from mlx_moeflux.checkpoint.source import open_checkpoint
from mlx_moeflux.experts.budget import measure_memory, parse_budget
from mlx_moeflux.experts.compute import on_cpu
from mlx_moeflux.experts.readers import make_reader
from mlx_moeflux.kernels.choice import choose_kernels
from mlx_moeflux.loading import load_model
from mlx_moeflux.models import model_class
from mlx_moeflux.models.weights import default_dtype

Say = Callable[[str], None]

CHECKED_SEQUENCES = 4
"""Of a batch, as many are checked for exactness."""

MOST_CHECKED = 2048
"""Tokens of a prompt that another program's layers are checked with."""


def machine() -> str:
    """The machine in general words: ``2-core x86_64 CPU``, or the GPU's name."""
    if mx.default_device() == mx.cpu:
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
    bench = _Bench(Path(directory), options, say)
    return bench.report(name or Path(directory).name, command)


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

    def report(self, name: str, command: str) -> Report:
        options = self.options
        memory = memory_bandwidth()
        disk = disk_bandwidth(self.mapped, threads=options.threads, seed=options.seed)
        report = Report(
            model=name,
            machine=machine(),
            versions={"mlx_moeflux": __version__, "backend": describe_backend()},
            card={},
            exact=[],
            command=command,
            options=options.as_dict(),
        )
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
        """Budgets that are loaded together, so that their trials take turns: all, if they fit."""
        budgets, options = self.options.expert_memory, self.options
        experts = sum(
            len(refs) * refs[0].nbytes
            for components in self.mapped.experts.values()
            for refs in components.values()
        )
        trunk = sum(tensor.ref.nbytes for tensor in self.mapped.trunk.values())
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
        before, options = settled_memory(), self.options
        more = {"expert_memory": budget, "expert_reader": options.reader} | more
        model = load_model(self.directory, expert_threads=options.threads, **more, **options.load)
        with model:
            if model.plan is not None:
                self.say(str(model.plan))
            held = settled_memory() - before
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
        """The model whose experts are read anew on every call."""
        kernels = choose_kernels(self.options.load.get("kernels"))
        reader = make_reader("auto", self.mapped.experts)
        store = exact.FreshStore(reader, ffn=kernels.expert_ffn, mix=kernels.expert_mix)
        with self._ours("auto", store=store) as fresh:
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
                "logits against mlx-lm computing in float32", difference, exact.OTHERS
            )
        if not on_cpu():
            # MLX on NVIDIA compiles its products of quantised matrices for every class of lengths,
            # for minutes in all: those of the prompt that is measured are needed anyway.
            length = min(MOST_CHECKED, *self.options.contexts)
            ids = self._check_ids(ours.model.config.vocab_size, length)
        parts = OurParts(ours.model), TheirParts(theirs.model)
        return compare_layers("against mlx-lm", *parts, ids, **self._layered)

    @property
    def _layered(self) -> dict[str, Any]:
        return {"decode": exact.DECODE_TOKENS, "dtype": self.dtype}

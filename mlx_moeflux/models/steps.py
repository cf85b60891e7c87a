"""How a model runs a step of one token a sequence: layer by layer, or from traces."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import mlx.core as mx

from mlx_moeflux.cache import MOST_ROWS, BaseCache, transaction
from mlx_moeflux.errors import MoefluxError
from mlx_moeflux.kernels.runtime import device
from mlx_moeflux.kernels.verify import failures
from mlx_moeflux.models.compiled import CompiledStep, Outputs, SegmentedStep
from mlx_moeflux.models.modules import declares_traceable
from mlx_moeflux.models.protocol import Decoder


class Steps:
    """Chooses how each step of a model runs, and keeps the traces. Called by its model alone.

    outputs: Computes a call layer by layer; see :meth:`DecoderModel._outputs`.
    traceable: True if all code of the model is traceable. plain: True if the code of all layers and
    blocks is this package's. The model sets both when it notices edits.
    whole: Traces of whole steps. segments: Traces of steps whose experts are on disk. waiting: As
    `whole`, with kernels that wait; they serve steps alone that a host answers.
    """

    def __init__(self, model: Decoder, outputs: Callable[..., Outputs]):
        # A cycle that the garbage collector frees.
        self._model, self._outputs = model, outputs
        self.traceable, self.plain = False, True
        self.whole, self.segments = CompiledStep(outputs), SegmentedStep(model)
        self.waiting = CompiledStep(outputs)
        self._generation = (0, failures.generation())

    def forget(self) -> None:
        """Drop all traces: a trace keeps the parameters and banks that it captured."""
        for step in (self.whole, self.waiting, self.segments):
            step.forget()

    @property
    def compiles(self) -> bool:
        """True if steps may run from traces. The model's ``compile_steps`` None means: on GPUs."""
        chosen = self._model.compile_steps
        return device.kind() != "cpu" if chosen is None else chosen

    def run(self, tokens: mx.array, cache: list[BaseCache]) -> mx.array | None:
        """Return the logits ``[B, 1, V]`` of uint32 tokens ``[B, 1]``, or None if this is no step
        or is to run as a prompt does. If it raises, `cache` is as it was before."""
        runtime = self._model.runtime
        logits = self._run_waiting(tokens, cache)
        if logits is not None:
            return logits
        if tokens.shape[1] > 1 or not self.compiles or not self.whole.fits(cache):
            return None
        self._drop_old()
        if self._can_replace():
            if runtime.experts_stay_on_device:
                return self._run_whole(tokens, cache)
            if tokens.shape[0] <= self._most_in_segments():
                return self._run_segments(tokens, cache)
        if self._model.training:
            return None
        with transaction(cache), runtime.observers.rows_known([tokens], [cache]):
            return runtime.noted(*self.whole.untraced(tokens, cache))

    def run_rows(self, tokens: mx.array, cache: list[BaseCache]) -> mx.array:
        """Return the logits ``[R, 1, V]`` of R rows ``[R, 1]`` of one sequence, from a trace; for
        at most as many as :meth:`rows_at_once`, if steps are compiled."""
        self._drop_old()
        count = tokens.shape[0]
        whole = self._model.runtime.experts_stay_on_device
        run = self._run_whole if whole else self._run_segments
        return run(tokens, cache, count=count)

    def rows_at_once(self, cache: list[BaseCache]) -> int:
        """Return how many of the next rows go through the layers together: one where calls of one
        token alone are known to give their bits, or are faster."""
        runtime = self._model.runtime
        store = runtime.store
        if not self._can_replace() or not self.plain:
            return 1
        if store.direct is None or store.ranks is not None:
            return 1
        if not self.compiles:
            # Without a trace, a GPU waits for the host, and may compute experts by stock MLX.
            return MOST_ROWS if device.kind() == "cpu" else 1
        most = min(entry.rows_ahead() for entry in cache) if self.whole.fits(cache) else 1
        if not runtime.experts_stay_on_device:
            most = min(most, self._most_in_segments())
        return max(most, 1)

    def _drop_old(self) -> None:
        """Drop the traces if they hold arrays or kernels that were replaced."""
        direct = self._model.runtime.store.direct
        generation = 0 if direct is None else direct.generation, failures.generation()
        if generation != self._generation:
            self._generation = generation
            self.forget()

    def _can_replace(self) -> bool:
        """Return True if a step of one token need not call the store layer by layer. Events,
        recordings, hooks and training need that."""
        model = self._model
        if not self.traceable or model.training or model.runtime.observers.active:
            return False
        return declares_traceable(model.runtime.router)

    def _most_in_segments(self) -> int:
        """Return how many tokens a step may have that runs from one trace per segment."""
        if self._model.runtime.store.steps is None or not self.plain:
            return 0
        return self.segments.most_pairs() // self._model.runtime.router.num_experts_per_tok

    def _run_waiting(self, tokens: mx.array, cache: list[BaseCache]) -> mx.array | None:
        """Run a step of one sequence in which kernels wait for experts, and evaluate it. Return
        None if this is none, or if it failed and left everything as it was."""
        runtime = self._model.runtime
        if tokens.size > 1 or (handshake := runtime.store.handshake) is None:
            return None
        if runtime.experts_stay_on_device or not self._can_replace() or not self.whole.fits(cache):
            return None
        # The errors of reads, waits, kernels and MLX: the other path has them again, or succeeds.
        errors = suppress(RuntimeError, ValueError, MoefluxError)
        with errors, transaction(cache), handshake.step():
            self._drop_old()
            if self.compiles:
                outputs = self.waiting(tokens, cache, repeated=handshake.begin_again)
            else:
                outputs = self._outputs(tokens, cache)
            device.settle()
            mx.eval(outputs)
            return runtime.noted(*outputs)
        return None

    def _run_whole(self, tokens: mx.array, cache: Sequence[Any], *, count: int = 1) -> mx.array:
        """Run a step as one trace."""
        traces, runtime = self.whole.traces, self._model.runtime
        outputs = self.whole(tokens, cache, count=count)
        if self.whole.traces == traces:
            direct = runtime.store.direct
            assert direct is not None  # a trace stands for its calls
            direct.count(tokens.shape[0])  # a replayed trace does not call the store
        return runtime.noted(*outputs)

    def _run_segments(self, tokens: mx.array, cache: Sequence[Any], *, count: int = 1) -> mx.array:
        """Run a step as one trace per segment."""
        runtime = self._model.runtime
        logits, h = self.segments(tokens, cache, count=count)
        return runtime.noted(logits, h, *runtime.marks(h))

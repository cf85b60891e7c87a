"""Base class of the models: everything around the forward pass."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, cast

import mlx.core as mx

from mlx_moeflux.backend import is_lost, use_mlx
from mlx_moeflux.cache import BaseCache, SequenceState, StateSpec
from mlx_moeflux.checkpoint.tables import Shard
from mlx_moeflux.errors import InputError
from mlx_moeflux.experts.budget import Plan
from mlx_moeflux.experts.io.row_table import RowStats
from mlx_moeflux.experts.store import ExpertStore
from mlx_moeflux.experts.telemetry.trace import TraceWriter
from mlx_moeflux.kernels.moe.expert_ffn import Activation, swiglu
from mlx_moeflux.kernels.registry import Kernels
from mlx_moeflux.models.hooks import MIXER, POINTS, Hook, check_point
from mlx_moeflux.models.layers import decoder_layer, forget_dense, stack
from mlx_moeflux.models.modules import RMS_NORMS, Module, Survey, declares_traceable, is_own
from mlx_moeflux.models.moe import HasKernels, Router, RouterLookahead, SparseMoeBlock
from mlx_moeflux.models.packed_parameters import EXPERTS, keep_views, pack, release
from mlx_moeflux.models.protocol import Decoder, named_parameters
from mlx_moeflux.models.runtime import Runtime
from mlx_moeflux.models.state_spec import state_spec
from mlx_moeflux.models.states import States
from mlx_moeflux.models.steps import Steps

# Tokens per mixer call; bounds the memory of attention scores and convolution windows.
PREFILL_CHUNK = 2048


def _blocks_in(part: Any) -> Iterator[SparseMoeBlock]:
    """Yield the MoE blocks inside a module, or a list or dict of modules."""
    if isinstance(part, SparseMoeBlock):
        yield part
    elif isinstance(part, Mapping | list | tuple):
        for child in part.values() if isinstance(part, Mapping) else part:
            yield from _blocks_in(child)


class StreamingModel(Module):
    """Base of the models: parameters, edits, and what users call of a loaded model.

    Subclasses set ``config``, ``model`` and ``steps``, and define ``layers`` and ``__call__``. Any
    thread may call it; a generator holds ``lock`` for each step.

    runtime: Store, lock, ranks, memory and observers; ``close`` frees what they hold. states: Makes
    and checks its states. steps: The traces of decode steps.
    """

    config: Any
    model: Any
    layers: Any
    steps: Steps
    CAN_LOOK_AHEAD: ClassVar[bool] = True
    """Whether a layer's hidden state is what the next layer's router takes."""

    @property
    def activation(self) -> Activation:
        """Activation of the routed experts, between their products."""
        return swiglu

    def __init__(self, router: Router, kernels: Kernels):
        super().__init__()
        self._router, self._kernels = router, kernels
        self.runtime = Runtime(router, lambda: self.steps.forget())
        self.states = States(self)
        self.prefill_chunk = PREFILL_CHUNK
        # What it drafts with, see mlx_moeflux.generation.drafting; None: nothing.
        self.drafting: Any = None
        self.identity = ""
        self.experts_identity: Callable[[], str] = str
        self.compile_steps: bool | None = None
        self._survey: Survey | None = None
        self._state_spec: StateSpec | None = None
        # No dict: nn.Module would take it for children.
        self._loaded: Mapping[int, SparseMoeBlock] = MappingProxyType({})
        # A closure, since nn.Module would take an attribute for a child module.
        self._prediction: Callable[[], Any] = lambda: None

    @property
    def dtype(self) -> mx.Dtype:
        """Dtype of activations: that of the final norm, or of another one if it was replaced."""
        norms = (self.model.norm, *self.modules())
        return next(norm for norm in norms if type(norm) in RMS_NORMS).weight.dtype

    @property
    def kernels(self) -> Kernels:
        """Implementation of every operation."""
        return self._kernels

    def update(self, *args, **kwargs) -> StreamingModel:
        """Update parameters as ``nn.Module.update`` does and drop all decode traces."""
        self.steps.forget()
        self.states.forget_arrays()
        super().update(*args, **kwargs)
        release(self)
        return self

    def prepare(self) -> None:
        """Concatenate projections that share an input and pack each half layer into one buffer, so
        that a launch takes fewer arrays; make short views of parameters. Peak memory grows by one
        layer.

        ``parameters()``, saving and loading keep the checkpoint's names: parameters become views.
        The ``stacks()`` of a module lists its projections with a common input. Kernels do not see
        a later in-place edit (``weight[0] = 0``): assign a new array.
        """
        for layer in filter(None, map(decoder_layer, self.layers)):
            for module in layer.children().values():
                for linears in module.stacks() if isinstance(module, Module) else ():
                    stack(*linears)
            for modules in layer.halves():
                pack(*modules)
        for block in self.moe_blocks().values():
            if block.get(EXPERTS) is not None:
                pack(block[EXPERTS])
        keep_views(self)
        mx.clear_cache()
        self.steps.forget()

    def notice_edits(self) -> None:
        """Do what follows from edits of modules, parameters, attributes and code since the last
        call: drop traces of what was before, and give new blocks the store.

        Raises:
            InputError: A module that is never called has a ``__call__`` that is not this package's,
                or is of another class than the module that reads it expects; or a block has other
                experts than the store.
        """
        use_mlx()
        if self._survey is not None and self._survey.holds():
            return
        survey = Survey(self, *([self._router] if declares_traceable(self._router) else []))
        if self._survey is None or not survey.equals(self._survey):
            self.steps.forget()
            self._connect()
        self._survey, self.steps.traceable = survey, survey.traceable

    def _connect(self) -> None:
        """Give the blocks their store and the next block's router, and note in them and in the
        layers whether their code is this package's."""
        blocks, count = self.moe_blocks(), self.config.num_hidden_layers
        if len(self.layers) != count:
            raise InputError(
                f"the model has {len(self.layers)} layers and its config {count}; a layer to leave "
                "out is one that returns its first argument, not one that is removed."
            )
        for layer, block in blocks.items():
            if block.layer != layer:
                raise InputError(
                    f"layers.{layer}.mlp is the block of layer {block.layer} and computes that "
                    "layer's experts; keep each block in its layer."
                )
            before = self._loaded.get(layer, block)
            if before.get(EXPERTS) is not block.get(EXPERTS):
                raise InputError(
                    f"layers.{layer}.mlp has other experts than were loaded; keep the block and "
                    "change its parameters or its __class__, or give the new one its switch_mlp."
                )
            block._store, block._lookahead = self.runtime.store, None
            block._plain = all(map(is_own, block.modules()))
        for layer in filter(None, map(decoder_layer, self.layers)):
            layer._plain = is_own(layer)
        self.steps.plain = all(
            decoder_layer(layer) is layer and layer._plain for layer in self.layers
        ) and all(self.layers[i].mlp is block and block._plain for i, block in blocks.items())
        if self.runtime.store is not None and self.CAN_LOOK_AHEAD:
            for layer, following in pairwise(blocks):
                after = decoder_layer(self.layers[following])
                if after is not None:
                    norm = after.router_norm
                    blocks[layer]._lookahead = RouterLookahead(norm, blocks[following])

    def train(self, mode: bool = True) -> StreamingModel:
        """Switch training mode; in it the references, which have gradients, compute operations."""
        super().train(mode)
        self.kernels.references_only(mode)
        if isinstance(self._router, HasKernels) and isinstance(self._router.kernels, Kernels):
            self._router.kernels.references_only(mode)
        if self.runtime.store is not None:
            self.runtime.store.training = mode
        return self

    def unfreeze(self, *args, **kwargs) -> StreamingModel:
        """Unfreeze as ``nn.Module.unfreeze`` does, except quantised modules."""
        super().unfreeze(*args, **kwargs)
        for module in self.modules():
            if "scales" in module:
                module.freeze(recurse=False)
        return self

    @property
    def router(self) -> Router:
        """Router of all MoE layers."""
        return self._router

    @property
    def store(self) -> ExpertStore:
        """Expert store of all MoE layers."""
        return self.runtime.store

    @property
    def plan(self) -> Plan | None:
        """Memory of the experts; None for a store that the user gave."""
        return self.runtime.plan

    @property
    def lock(self) -> threading.RLock:
        """Lock that a generator holds for each step. A thread of the parent may hold it for ever
        in a forked process, so that the property raises what ``use_mlx`` does."""
        return self.runtime.lock

    def make_cache(self) -> SequenceState:
        """Return an empty state: one entry per layer, as the config declares it."""
        return self.states.make()

    def quantize_cache(self, bits: int | None, group_size: int = 64) -> None:
        """Store keys and values of new states, a head's too, in 4 or 8 bits; see
        :meth:`~mlx_moeflux.models.states.States.quantize`."""
        self.states.quantize(bits, group_size)
        if self.prediction is not None:
            self.prediction.body.quantize_cache(bits, group_size)
        self._state_spec = None

    def state_spec(self) -> StateSpec:
        """Return identity and shapes of this model's states, computed on first use."""
        if self._state_spec is None:
            self._state_spec = state_spec(cast("Decoder", self))
        return self._state_spec

    def state_bytes(self, positions: int) -> int:
        """Return the bytes of one sequence's state after `positions` tokens, spare rows
        included."""
        return sum(entry.nbytes(positions) for entry in self.states.entry_specs())

    def activation_bytes(self, tokens: int) -> int:
        """Return an upper bound of the bytes that a call on `tokens` tokens of an empty state
        allocates."""
        raise NotImplementedError

    def context_left(self, cache: Sequence[BaseCache] | None = None) -> int:
        """Return how many tokens the longest sequence of a state may still take.

        Raises:
            CacheError: The entries of `cache` have different positions.
        """
        return self.states.context_left(cache)

    def bytes_per_position(self) -> int:
        """Return the bytes that each token adds to a sequence's state."""
        return sum(entry.row_bytes for entry in self.states.entry_specs())

    def trunk_bytes(self) -> int:
        """Return the bytes of all parameters; resident experts count once they are set."""
        return sum(array.nbytes for _, array in named_parameters(self))

    def open_tables(
        self,
        tables: Mapping[int, Sequence[Shard]],
        *,
        file: Path,
        memory: str | float,
        threads: int,
    ) -> None:
        """Open the tables of rows that stay on disk; most models have none.

        tables: Layer -> shards. file: config.json. memory: Bytes of recent rows, as
        :func:`~mlx_moeflux.experts.budget.parse_budget` takes them. threads: That read a table.

        Raises:
            ConfigError: The tables are not those of the config.
            CheckpointError, ExpertFileError: A table cannot be read.
            InputError: `memory` is no amount.
        """

    def row_stats(self) -> RowStats | None:
        """Return the account of all tables on disk, or None if there are none."""
        return self.runtime.row_stats()

    @property
    def prediction(self) -> Any:
        """Head of multi-token prediction, a :class:`~mlx_moeflux.models.mtp.PredictionHead`, or
        None."""
        return self._prediction()

    def set_prediction(self, head: Any) -> None:
        """Set the head of multi-token prediction, whose experts have a store of their own; it is
        released and closed with the model."""
        self._prediction = lambda: head
        head.body.quantize_cache(self.states.kv_bits, self.states.kv_group_size)

    def set_store(self, store: ExpertStore) -> None:
        """Set the store that computes the experts of every MoE block."""
        self.runtime.store = store
        store.training = self.training
        self.steps.forget()
        self._loaded = MappingProxyType(self.moe_blocks())
        self._connect()

    def moe_blocks(self) -> dict[int, SparseMoeBlock]:
        """Return MoE layer id -> block, also of layers and blocks that others wrap."""
        return {i: block for i, layer in enumerate(self.layers) for block in _blocks_in(layer)}

    def record(
        self, layers: Iterable[int] | None = None, names: Iterable[str] | None = None
    ) -> AbstractContextManager[dict[int, dict[str, mx.array]]]:
        """Record intermediate arrays of the calls inside the block; see
        :mod:`mlx_moeflux.models.record`."""
        parts = [decoder_layer(layer) for layer in self.layers]
        return self.runtime.observers.record(parts, chosen=layers, names=names)

    def collect_hidden(self) -> AbstractContextManager[list[mx.array]]:
        """Collect the output of the last layer before the final norm, ``[B, T, C]``, of each call
        inside the block; ``[R, 1, C]`` of R rows."""
        return self.runtime.observers.collect_hidden()

    def hook(self, layer: int, point: str, function: Callable[..., Any]) -> Hook:
        """Call `function` with arrays of every call of a layer, which it may replace.

        layer: Its number. point: One of :data:`~mlx_moeflux.models.hooks.POINTS`, which has the
        shapes. function: Takes the point's arrays, lazy, and, if it has a parameter `mask`, which
        tokens are real; returns None, or what the model goes
        on with: as many arrays of the same shapes and dtypes. Functions at one point are called in
        the order in which they came, each with what the one before returned.

        While a model has a hook, its decode steps run operation by operation and not from a trace;
        without one, a step is what it was. A function that reads numbers waits for them.

        Returns:
            A handle with ``remove()``; as a context manager it removes the hook at the end.

        Raises:
            InputError: The layer or the point does not exist, or `function` is not callable.
            ShapeError: In a call of the model: the function returned something else.
        """
        check_point(point)
        if not callable(function):
            raise InputError(f"the hook {point} is {function!r}; give a callable.")
        self._check_layer(layer)
        part = self.layers[layer]
        module = decoder_layer(part) if POINTS[point] == MIXER else next(_blocks_in(part), None)
        if module is None:
            raise InputError(f"layer {layer} has no {POINTS[point]} to hook.")
        return self.runtime.observers.hook(module, layer, point, function)

    def _check_layer(self, layer: int) -> None:
        if not isinstance(layer, int) or not 0 <= layer < len(self.layers):
            raise InputError(f"layer {layer!r} does not exist; the model has {len(self.layers)}.")

    def trace(self, path: str | os.PathLike[str]) -> AbstractContextManager[TraceWriter]:
        """Write the experts of every token to a file; see
        :mod:`mlx_moeflux.experts.telemetry.trace`. Inside the block every layer synchronises and
        decode steps run eagerly.

        Raises:
            InputError: The file cannot be written, or the store has no events.
        """
        return self.runtime.observers.trace(path, model=self.identity)

    def attribute(self) -> AbstractContextManager[None]:
        """Fill ``store.stats().calls`` and a response's ``experts.calls`` with the cost of each
        layer call; see :mod:`mlx_moeflux.experts.telemetry.attribution`. Inside the block every
        layer synchronises and decode steps run eagerly.

        Raises:
            InputError: The store has no events.
        """
        return self.runtime.observers.attribute()

    def set_expert_memory(self, budget: str | float) -> None:
        """Resize the banks of streamed experts; `budget` as in ``load(expert_memory=...)``.

        The eviction policy chooses the experts that leave. Results keep their bits.

        Raises:
            InputError: The experts are not streamed, or `budget` is malformed.
            MemoryBudgetError: `budget` is too small for one token.
        """
        self.runtime.set_expert_memory(budget)

    def run_layer(self, layer: int, hidden: mx.array, cache=None) -> mx.array:
        """Run one layer alone: hidden ``[B, T, C]`` -> ``[B, T, C]``.

        cache: The layer's entry of :meth:`make_cache`, or None for an empty one.
        """
        self._check_layer(layer)
        self.notice_edits()
        cache = self.make_cache()[layer] if cache is None else cache
        mask = cache.real_tokens(hidden.shape[1])
        return self.layers[layer](hidden, cache, mask, chunk=self.prefill_chunk)

    def release(self) -> None:
        """Free the memory of the experts until the next call, which reads them again: all of a
        resident model, those in slots of a streamed one. Results stay the same bit for bit.

        Parameters of resident experts that were assigned since loading are lost.
        """
        self.runtime.release()
        if self.prediction is not None:
            self.prediction.body.release()

    def close(self) -> None:
        """Free the expert bank, its files and threads. A closed model cannot run. In a forked
        process this does nothing: the threads are the parent's."""
        if is_lost():
            return
        self.runtime.close()
        if self.prediction is not None:
            self.prediction.body.close()
        forget_dense(self)

    def __enter__(self):
        return self

    def __exit__(self, *exception) -> None:
        self.close()

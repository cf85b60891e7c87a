"""What every architecture offers around its forward pass."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten

from mlx_moeflux.cache import BaseCache, EntrySpec, SequenceState, StateSpec, check_positions
from mlx_moeflux.cache.kv import KV_BITS, quantized
from mlx_moeflux.checkpoint.quantization import GROUP_SIZES
from mlx_moeflux.errors import InputError
from mlx_moeflux.experts.budget import format_bytes, parse_budget, slots_for_budget
from mlx_moeflux.experts.store import ExpertStore
from mlx_moeflux.experts.telemetry.attribution import Attribution
from mlx_moeflux.experts.telemetry.events import both
from mlx_moeflux.experts.telemetry.trace import TraceInfo, TraceWriter
from mlx_moeflux.kernels.registry import Kernels
from mlx_moeflux.kernels.runtime import failures
from mlx_moeflux.models.compiled import CompiledStep, SegmentedStep
from mlx_moeflux.models.layers import forget_dense, stack
from mlx_moeflux.models.moe import Router, RouterLookahead, SparseMoeBlock, traceable
from mlx_moeflux.models.packed_parameters import EXPERTS, pack, release
from mlx_moeflux.models.record import record
from mlx_moeflux.models.state_spec import entry_specs, state_spec

# Tokens that a mixer takes at a time: bounds attention scores and convolution windows.
PREFILL_CHUNK = 2048


class StreamingModel(nn.Module):
    """Base of the models: layers, expert store, inspection and clean-up.

    Subclasses set ``config``, ``model``, ``_kernels``, ``_router`` and define ``layers``,
    ``__call__`` and ``make_cache``.
    """

    def __init__(self):
        super().__init__()
        self.prefill_chunk = PREFILL_CHUNK
        self.max_context: int | None = None
        self.plan = None
        self.identity = ""
        self.compile_steps: bool | None = None
        self._step: CompiledStep | None = None
        self._segments: SegmentedStep | None = None
        self._recordings, self._generation = 0, (0, failures.generation())
        self._step_lock = threading.RLock()
        self._store = None
        self._state_spec: StateSpec | None = None
        self._entry_specs: tuple[EntrySpec, ...] | None = None
        self.kv_bits: int | None = None
        self.kv_group_size = 64

    @property
    def kernels(self) -> Kernels:
        """The implementation of every operation."""
        return self._kernels

    def update(self, *args, **kwargs) -> StreamingModel:
        """See ``nn.Module.update``. Parameters that are assigned in other ways after the first
        step need ``model.forget_steps()``."""
        self.forget_steps()
        self._entry_specs = None
        super().update(*args, **kwargs)
        release(self)
        return self

    def prepare(self) -> None:
        """Lay matrices that read the same input one behind another, and the parameters of half a
        layer into one buffer: fewer arrays for each launch. Holds a layer twice for a moment.

        ``parameters()``, saving and loading keep the checkpoint's names: parameters are views of
        what was laid together. A module says which of its own by ``stacks()``. A parameter that is
        edited in place afterwards (``weight[0] = 0``) is not seen by kernels: assign a new array.
        """
        for layer in self.layers:
            for module in layer.children().values():
                for linears in getattr(module, "stacks", list)():
                    stack(*linears)
            for modules in layer.halves():
                pack(*modules)
            experts = layer.mlp.get(EXPERTS)
            if experts is not None:
                pack(experts)
        mx.clear_cache()
        self.forget_steps()

    def forget_steps(self) -> None:
        """Trace decode steps again: a trace keeps the parameters and banks that it met."""
        for step in (self._step, self._segments):
            if step is not None:
                step.forget()

    def _can_compile(self) -> bool:
        """Whether a step of one token may run from a trace: not while somebody listens or records.
        compile_steps: None is where it pays, on GPUs."""
        generation = self._store.generation, failures.generation()
        if generation != self._generation:
            self._generation = generation
            self.forget_steps()
        wanted = self.compile_steps
        if wanted is None:
            wanted = mx.default_device() != mx.cpu
        watched = self._recordings or self._store.events is not None
        return wanted and not self.training and not watched and traceable(self._router)

    def _can_cut(self, tokens: int) -> bool:
        """Whether a step of so many tokens may run in segments from traces."""
        pairs = tokens * self._router.num_experts_per_tok
        return self._store.parts_calls and self._segments.fits(pairs)

    def train(self, mode: bool = True) -> StreamingModel:
        """Training mode; operations are then computed by their references, which have
        gradients."""
        super().train(mode)
        for holder in (self, self._router):
            kernels = getattr(holder, "kernels", None)
            if isinstance(kernels, Kernels):
                kernels.references_only(mode)
        return self

    @property
    def router(self) -> Router:
        """Who chooses experts in all layers."""
        return self._router

    @property
    def store(self) -> ExpertStore:
        """The :class:`~mlx_moeflux.experts.store.ExpertStore` that all layers ask."""
        return self._store

    @property
    def lock(self) -> threading.RLock:
        """Held by a generator for each step: a second thread's step waits."""
        return self._step_lock

    def start_eval(self) -> None:
        """Let other threads wait for what this one began to evaluate; see the store's method."""
        self._store.start_eval()

    def set_context_limit(self, limit: int | None) -> None:
        """Tokens that a sequence may have; None is the config's own limit.

        Raises:
            InputError: `limit` is not between 1 and ``max_position_embeddings``.
        """
        longest = self.config.max_position_embeddings
        if limit is not None and not 1 <= limit <= longest:
            raise InputError(f"max_context is {limit}; this model allows 1 to {longest}.")
        self.max_context = limit or longest

    def new_state(self, entries: Iterable[BaseCache]) -> SequenceState:
        """What ``make_cache`` returns: `entries` as one state of this model, with keys and values
        in ``kv_bits`` bits if that is set."""
        return SequenceState(map(self._quantized, entries), self.state_spec)

    def _quantized(self, entry: BaseCache) -> BaseCache:
        if self.kv_bits is None or entry.token_axis is None or not entry.empty():
            return entry
        return quantized(
            type(entry),
            bits=self.kv_bits,
            group_size=self.kv_group_size,
            dtype=self.model.norm.weight.dtype,
        )()

    def quantize_cache(self, bits: int | None, group_size: int = 64) -> None:
        """Keep keys and values of states made from now on in 4 or 8 bits, in groups that have a
        scale each; None: as they are.

        Raises:
            InputError: Other bits or groups, or a group does not divide a row.
        """
        if bits not in (None, *KV_BITS) or group_size not in GROUP_SIZES:
            raise InputError(
                f"kv_bits is {bits} in groups of {group_size}; give 4 or 8 and groups of "
                f"{', '.join(map(str, GROUP_SIZES))}."
            )
        self.kv_bits, self.kv_group_size = bits, group_size
        self._state_spec = self._entry_specs = None
        self.entry_specs()  # packs a row of every layer

    def state_spec(self) -> StateSpec:
        """Identity and shapes of this model's states; made when first asked for."""
        if self._state_spec is None:
            self._state_spec = state_spec(self)
        return self._state_spec

    def entry_specs(self) -> tuple[EntrySpec, ...]:
        """What each entry of :meth:`make_cache` holds; made when first asked for."""
        if self._entry_specs is None:
            with self.lock:
                self._entry_specs = entry_specs(self)
        return self._entry_specs

    def state_bytes(self, positions: int) -> int:
        """Bytes of one sequence's state after `positions` tokens, with the rows that buffers have
        in reserve."""
        return sum(entry.nbytes(positions) for entry in self.entry_specs())

    def context_left(self, cache: Sequence[BaseCache] | None = None) -> int:
        """Tokens that a state has room for; of all its sequences, the longest counts.

        Raises:
            CacheError: Its entries disagree about what they have seen.
        """
        used = max(check_positions(cache)) if cache else 0
        return (self.max_context or self.config.max_position_embeddings) - used

    def bytes_per_position(self) -> int:
        """Bytes by which a sequence's state grows with each token."""
        return sum(entry.row_bytes for entry in self.entry_specs())

    def trunk_bytes(self) -> int:
        """Bytes of all parameters; ask before resident experts are added."""
        return sum(array.nbytes for _, array in tree_flatten(self.parameters()))

    def set_store(self, store: ExpertStore) -> None:
        """Give every MoE block the store that computes its experts."""
        self._store = store
        self.forget_steps()
        blocks = self.moe_blocks()
        for block in blocks.values():
            block._store, block._lookahead = store, None
        if store.looks_ahead:
            for layer, following in pairwise(blocks):
                norm = self.layers[following].post_attention_layernorm
                blocks[layer]._lookahead = RouterLookahead(norm, blocks[following])

    def moe_blocks(self) -> dict[int, SparseMoeBlock]:
        """MoE layer id -> block."""
        blocks = ((i, layer.mlp) for i, layer in enumerate(self.layers))
        return {i: block for i, block in blocks if isinstance(block, SparseMoeBlock)}

    @contextmanager
    def record(
        self, layers: Iterable[int] | None = None, names: Iterable[str] | None = None
    ) -> Iterator[dict[int, dict[str, mx.array]]]:
        """Keep intermediate arrays of the next calls: see :mod:`mlx_moeflux.models.record`."""
        self._recordings += 1
        try:
            with record(self.layers, chosen=layers, names=names) as kept:
                yield kept
        finally:
            self._recordings -= 1

    @contextmanager
    def trace(self, path: str | os.PathLike[str]) -> Iterator[TraceWriter]:
        """Record which experts every token chooses into a file, see
        :mod:`mlx_moeflux.experts.telemetry.trace`. While this lasts every layer synchronises and
        decode steps are not traced.

        Raises:
            InputError: The file cannot be written, or the store has no events.
        """
        store = self._store
        info = TraceInfo.of(
            store, experts_per_token=self._router.num_experts_per_tok, model=self.identity
        )
        with TraceWriter(path, info) as writer:
            before = store.events
            store.events = both(before, writer)
            try:
                yield writer
            finally:
                store.events = before

    @contextmanager
    def attribute(self) -> Iterator[None]:
        """While this lasts, ``store.stats().calls`` and the ``experts.calls`` of a response tell
        what each call of each layer cost, see :mod:`mlx_moeflux.experts.telemetry.attribution`.
        Every layer synchronises and decode steps are not traced.

        Raises:
            InputError: The store has no events.
        """
        store, stats = self._store, self._store.stats()
        before, listener = store.events, Attribution(stats)
        store.events = both(before, listener)
        stats.calls = []
        try:
            yield
        finally:
            store.events = before
            listener.end_of_call()
            stats.calls = None

    def set_expert_memory(self, budget: str | float) -> None:
        """Give the streamed experts another budget, as ``load(expert_memory=...)`` takes it, now:
        banks shrink and grow, the policy chooses who leaves. Results stay the same, bit for bit.

        Raises:
            InputError: The experts are not streamed, or `budget` cannot be read.
            MemoryBudgetError: It is too small for one token.
        """
        store = self._store
        if not store.slots:
            raise InputError("these experts are not streamed; load with a smaller expert_memory.")
        with self.lock:
            asked = parse_budget(budget, sum(store.block_bytes.values()) * store.num_experts)
            if asked is None:
                raise InputError("expert memory at run time must be a number, such as 2GB or 50%.")
            slots = slots_for_budget(
                asked,
                store.block_bytes,
                num_experts=store.num_experts,
                experts_per_token=self._router.num_experts_per_tok,
                staging_bytes=store.nbytes - store.bank_bytes,
            )
            # A trace of complete layers would keep the old banks in memory.
            self.forget_steps()
            store.resize_all(slots)
            if self.plan is not None:
                why = f"{budget if isinstance(budget, str) else format_bytes(budget)} was set"
                self.plan = replace(self.plan, slots=slots, budget_bytes=asked, why=why)

    def run_layer(self, layer: int, hidden: mx.array, cache=None) -> mx.array:
        """Run one layer alone: hidden ``[B, T, C]`` -> ``[B, T, C]``.

        cache: That layer's entry of :meth:`make_cache`, or None for a fresh one.
        """
        if not 0 <= layer < len(self.layers):
            raise InputError(f"layer {layer} does not exist; the model has {len(self.layers)}.")
        cache = self.make_cache()[layer] if cache is None else cache
        return self.layers[layer](hidden, cache, chunk=self.prefill_chunk)

    def close(self) -> None:
        """Free the expert bank, its files and threads. The model cannot run afterwards."""
        if self._store is not None:
            self._store.close()
        forget_dense(self)

    def __enter__(self):
        return self

    def __exit__(self, *exception) -> None:
        self.close()

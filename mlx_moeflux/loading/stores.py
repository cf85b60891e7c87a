"""The store of a model's experts: planned and built, or given and checked."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial

import mlx.core as mx

from mlx_moeflux.checkpoint.names import MappedTensors
from mlx_moeflux.checkpoint.tensors import mlx_dtype
from mlx_moeflux.distributed.part import Part
from mlx_moeflux.errors import InputError, MemoryBudgetError, ShapeError
from mlx_moeflux.experts.budget import (
    AUTO,
    KV_POSITIONS,
    Memory,
    Plan,
    format_bytes,
    make_plan,
    parse_budget,
)
from mlx_moeflux.experts.compute import ExpertMix
from mlx_moeflux.experts.io.decoding import Experts
from mlx_moeflux.experts.io.desk import desk_bytes
from mlx_moeflux.experts.io.layout import BlockLayout
from mlx_moeflux.experts.io.native_pool import NativePool, staging_bytes
from mlx_moeflux.experts.io.readers import PAGE_CACHED, Reader, check_reader
from mlx_moeflux.experts.io.replicas import open_readers
from mlx_moeflux.experts.policies.eviction import is_known, make_eviction
from mlx_moeflux.experts.policies.prefetch import AutoLookAhead
from mlx_moeflux.experts.policies.timed_budget import Budget, TimedBudget
from mlx_moeflux.experts.resident import ResidentStore
from mlx_moeflux.experts.store import ExpertStore, check_result
from mlx_moeflux.experts.streaming import handshake_trial
from mlx_moeflux.experts.streaming.store import DEFAULT_THREADS, StreamedStore
from mlx_moeflux.experts.telemetry.events import EventHook
from mlx_moeflux.kernels.linear.blocks import decoding_bytes
from mlx_moeflux.kernels.moe.expert_ffn import ExpertBank
from mlx_moeflux.kernels.registry import Dispatcher
from mlx_moeflux.kernels.runtime import device
from mlx_moeflux.loading import kept_budget
from mlx_moeflux.loading.heads import OpenedHead
from mlx_moeflux.loading.options import LoadOptions
from mlx_moeflux.models.decoder import DecoderModel
from mlx_moeflux.models.layers import BlocksLinear, weights_of
from mlx_moeflux.models.weights import ExpertsOnDisk

# What a smaller budget is of the one that `auto` plans. The page cache has as much as the bank at
# first, so that half a bank gives it half as much again.
SMALLER = 2


def make_store(
    model: DecoderModel,
    mapped: MappedTensors,
    layouts: dict[int, BlockLayout],
    options: LoadOptions,
    *,
    part: Part | None,
    places: Mapping[str, Experts],
    memory: Memory,
    head: OpenedHead | None = None,
) -> tuple[StreamedStore | ResidentStore, Plan]:
    """Plan the memory of the experts and build their store; closes the reader unless it is used.

    part: This rank's, whose experts alone `mapped` has; None: one process has all. places: Path ->
    the same experts there, the first those of `mapped`. head: Shares the budget as a further layer,
    and gets a store of its own.

    Raises:
        InputError: An option is out of range.
        MemoryBudgetError: The budget is too small, or an array too large for the GPU.
    """
    given = options.reader
    reader = given or open_readers(options.expert_reader, places)
    E, mix, events = model.config.num_experts, model.kernels.expert_mix, options.events
    if part is not None:
        E, events = part.num_experts, None  # the events are those of all ranks
    prefetch = options.prefetch
    # Ranks wait for one another, so that one's seconds do not tell what its own choice costs.
    if isinstance(prefetch, AutoLookAhead) and (part is not None or not model.CAN_LOOK_AHEAD):
        prefetch = None
    threads = DEFAULT_THREADS if options.expert_threads is None else options.expert_threads
    with ExitStack() as opened:
        opened.callback(reader.close)
        if head is not None:
            opened.callback(head.reader.close)
        if given is not None:
            check_reader(
                reader,
                layers=sorted(layouts),
                num_experts=E,
                hidden=model.config.hidden_size,
                intermediate=model.config.moe_intermediate_size,
            )
        asked = AUTO if options.expert_memory is None else options.expert_memory
        K = min(model.router.num_experts_per_tok, E)
        pull, why = _handshake(options, reader, prefetch, part, K)
        positions = min(KV_POSITIONS, model.config.max_position_embeddings)
        blocks = {layer: layout.nbytes for layer, layout in layouts.items()}
        trunk, kv = model.trunk_bytes(), model.state_bytes(positions)
        staging = staging_bytes(reader, threads)
        if head is not None:
            blocks[head.layer] = head.block_bytes_for(E)
            trunk, kv = trunk + head.trunk_bytes, kv + head.head.body.state_bytes(positions)
            staging += staging_bytes(head.reader, threads)
        planned = partial(
            make_plan,
            asked,
            blocks,
            num_experts=E,
            experts_per_token=K,
            trunk_bytes=trunk,
            row_bytes=model.runtime.row_bytes,
            kv_bytes=kv,
            memory=memory,
            reader=reader.name + (f" from {len(places)} places" if len(places) > 1 else ""),
            reserved=options.reserved_memory,
        )
        try:
            plan = planned(staging_bytes=staging + _shared_bytes(reader, pull))
        except MemoryBudgetError:
            if pull is None:
                raise
            pull, why = None, _why("its memory does not fit the budget", options)
            plan = planned(staging_bytes=staging)
        slots = 0
        if head is not None:
            plan, slots = _without_head(plan, head, E)
        _check_buffers(plan, layouts)
        if plan.resident and given is None:
            reader.close()
            store = _resident(model, mapped, layouts, E, mix, events, options.verbose)
        else:
            timed = None
            shared = given is None and part is None and memory.backend != "cuda" and not pull
            if parse_budget(asked, plan.expert_bytes) is None and shared and not options.safe:
                timed = _timed_budget(plan, layouts, reader, threads, pairs=K, model=model.identity)
            if timed is not None and timed.wanted is timed.smaller:
                counts, nbytes = timed.wanted
                half = f"{plan.why}, of which half was measured to be faster"
                plan = replace(plan, slots=counts, budget_bytes=nbytes, why=half)
            store = StreamedStore(
                reader,
                plan.slots,
                threads=threads,
                events=events,
                mix=mix,
                activation=model.activation,
                eviction=options.eviction,
                prefetch=prefetch,
                keep_all_ahead=options.keep_all_ahead,
                timed_budget=timed,
                handshake=pull or why,
            )
        opened.callback(store.close)
        if head is not None:
            _set_head_store(head, slots, threads)
        opened.pop_all()
        return store, plan


def _without_head(plan: Plan, head: OpenedHead, num_experts: int) -> tuple[Plan, int]:
    """Return a plan of the model's experts alone, and the slots of the head's."""
    counts = dict(plan.slots)
    count = counts.pop(head.layer)
    slots = head.num_experts
    if not plan.resident:
        least = min(head.head.body.router.num_experts_per_tok, slots)
        slots = max(count * slots // num_experts, least)
    planned = head.block_bytes_for(num_experts)
    return replace(
        plan,
        slots=counts,
        trunk_bytes=plan.trunk_bytes - head.trunk_bytes,
        expert_bytes=plan.expert_bytes - num_experts * planned,
        budget_bytes=plan.budget_bytes - count * planned,
        draft_bytes=head.trunk_bytes + slots * head.layout.nbytes,
    ), slots


def _set_head_store(head: OpenedHead, slots: int, threads: int) -> None:
    """Give the head of multi-token prediction a store of its layer's experts."""
    body, mix = head.head.body, head.head.body.kernels.expert_mix
    if slots == head.num_experts:
        head.reader.close()
        layouts = {0: head.layout}
        store = _resident(body, head.mapped, layouts, head.num_experts, mix, None, False)
    else:
        options = {"threads": threads, "mix": mix, "activation": body.activation}
        store = StreamedStore(head.reader, slots, **options)
    body.set_store(store)


def _handshake(
    options: LoadOptions, reader: Reader, prefetch: object, part: Part | None, k: int
) -> tuple[device.Pull | None, str | None]:
    """Return the kernel that waits for the `k` experts of a token; where something excludes it, see
    ``docs/handshake.md``, None and :func:`_why`."""
    on_metal = device.kind() == "metal"
    if options.handshake is False or (on_metal and options.handshake is None):
        return None, None
    excluded = {
        "--safe excludes it": options.safe,
        "a listener of events excludes it": options.events is not None,
        "a prefetcher excludes it": prefetch is not None,
        "several ranks exclude it": part is not None,
        "it needs the eviction lfu or lru": not is_known(make_eviction(options.eviction)),
    }
    found = next((what for what, holds in excluded.items() if holds), None)
    if found is None:
        pull = device.pull_for(k)
        if pull is None:
            found = "no kernel waits on this device for so many experts"
        elif not NativePool.serves(reader):
            found = "the reader has no native threads"
        elif not on_metal or (found := handshake_trial.refusal()) is None:
            return pull, None
    return None, _why(found, options)


def _why(found: str, options: LoadOptions) -> str | None:
    """Return for the statistics why there is no handshake; None if nobody asked for it."""
    return found if options.handshake else None


def _shared_bytes(reader: Reader, pull: device.Pull | None) -> int:
    """Return the bytes that kernels and threads of a handshake share."""
    return desk_bytes(reader, pull) if pull and NativePool.serves(reader) else 0


def _timed_budget(
    plan: Plan,
    layouts: Mapping[int, BlockLayout],
    reader: Reader,
    threads: int,
    *,
    pairs: int,
    model: str,
) -> TimedBudget | None:
    """Return the trial of a smaller budget than `plan` has, or the verdict that was kept for this
    model and machine; None where a smaller one cannot be faster, or does not hold a token's
    `pairs` experts a layer."""
    slots = {layer: count // SMALLER for layer, count in plan.slots.items()}
    if reader.name not in PAGE_CACHED or min(slots.values()) < pairs:
        return None
    staged = staging_bytes(reader, threads)
    larger, smaller = (
        Budget(counts, staged + sum(n * layouts[layer].nbytes for layer, n in counts.items()))
        for counts in (plan.slots, slots)
    )
    file = kept_budget.file(model, reader.name)
    return TimedBudget(
        larger,
        smaller,
        pairs=pairs,
        verdict=kept_budget.read(file, larger.nbytes),
        keep=partial(kept_budget.write, file, larger.nbytes),
    )


def bytes_to_decode(
    layouts: Iterable[BlockLayout], mix: Dispatcher, *, experts_per_token: int, most_tokens: int
) -> int:
    """Return a bound of the bytes that a call of up to `most_tokens` tokens allocates to decode
    experts in ggml's blocks; 0 if kernels read all of them."""
    found = 0
    for layout in layouts:
        if not any(spec is not None and spec.block is not None for spec in layout.specs.values()):
            continue
        C, F = layout.hidden, layout.intermediate
        slot = {c.name: mx.zeros((1, *c.shape), mlx_dtype(c.dtype)) for c in layout.components}
        bank = ExpertBank.of(slot, layout.specs)
        for n in (1, most_tokens):
            if not mix.takes(mx.zeros((n, C)), None, mx.zeros((n, experts_per_token)), bank):
                found = max(found, decoding_bytes(F, C))
    return found


def trunk_bytes_to_decode(model: DecoderModel, project: Dispatcher, dtype: mx.Dtype) -> int:
    """Return a bound of the bytes that a call allocates to decode matrices of the trunk in ggml's
    blocks; 0 if kernels read all of them. dtype: Of the rows."""
    layers = [module for module in model.modules() if isinstance(module, BlocksLinear)]
    if not layers:
        return 0
    call = mx.zeros((1, 1), dtype), weights_of(layers[0])
    reads = dtype != mx.float32 and project.goes_beyond_reference(*call)
    return 0 if reads else decoding_bytes(1, max(layer.width for layer in layers))


def _check_buffers(plan: Plan, layouts: dict[int, BlockLayout]) -> None:
    """Compare the arrays of experts with the largest buffer of the GPU.

    Raises:
        MemoryBudgetError: One is larger.
    """
    most = device.largest_buffer()
    for layer, slots in plan.slots.items():
        component = max(layouts[layer].components, key=lambda c: c.nbytes)
        if most is not None and slots * component.nbytes > most:
            fitting = plan.budget_bytes * (most // component.nbytes) // slots
            raise MemoryBudgetError(
                f"'{component.name}' of {slots} experts of layer {layer} takes "
                f"{format_bytes(slots * component.nbytes)}, and a buffer of this GPU at most "
                f"{format_bytes(most)}; give an expert_memory of at most {format_bytes(fitting)}."
            )


def _resident(
    model: DecoderModel,
    mapped: MappedTensors,
    layouts: dict[int, BlockLayout],
    num_experts: int,
    mix: ExpertMix,
    events: EventHook | None,
    verbose: bool,
) -> ResidentStore:
    layers = {i: (mapped.experts[i], layouts[i].specs) for i in model.moe_blocks()}
    disk = ExpertsOnDisk(model.moe_blocks(), layers, model.activation)
    disk.read(verbose=verbose and sys.stderr.isatty())
    return ResidentStore(
        disk.bank,
        layers=layers,
        num_experts=num_experts,
        events=events,
        mix=mix,
        block_bytes={layer: layout.nbytes for layer, layout in layouts.items()},
        disk=disk,
    )


def check_store(
    store: ExpertStore, model: DecoderModel, layouts: dict[int, BlockLayout], dtype: mx.Dtype
) -> None:
    """Run a custom store once.

    Raises:
        InputError: It fails.
        ShapeError: Its layers, or shape, dtype or values of its result, are wrong.
    """
    name, N, C = type(store).__name__, 3, model.config.hidden_size
    if tuple(store.layers) != tuple(sorted(layouts)):
        raise ShapeError(f"{name} has layers {list(store.layers)}, expected {sorted(layouts)}.")
    logits = mx.random.normal((N, model.config.num_experts), key=mx.random.key(0))
    ids, weights = model.router(logits)
    x = mx.random.normal((N, C), key=mx.random.key(1)).astype(dtype)
    for layer in store.layers:
        try:
            y = store.experts(layer, x, ids, weights)
        except Exception as error:
            raise InputError(
                f"{name}.experts fails in layer {layer}: {type(error).__name__}: {error}."
            ) from error
        check_result(store, layer, x, y)
        if not mx.isfinite(y).all().item():
            raise ShapeError(
                f"{name}.experts returns numbers that are not finite in layer {layer}."
            )

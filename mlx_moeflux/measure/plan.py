"""Will it fit, and how fast can it be: from a model's sizes and a machine's. No MLX.

Sizes come from config.json and tensor headers alone. They are exact where the checkpoint is
streamed as it is; with `bits`, they are what a conversion would give.

The decision is that of loading. Speeds are arithmetic on bandwidths, with six constants that fit
rates which others published of named Macs (docs/notes/estimates.md);
:mod:`mlx_moeflux.measure.tune` measures.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod, sqrt
from pathlib import Path
from typing import Any

from mlx_moeflux.checkpoint.blocks import BLOCK_MODES
from mlx_moeflux.checkpoint.config import hoisted
from mlx_moeflux.checkpoint.formats.decoded import sources_of
from mlx_moeflux.checkpoint.hub import resolve_headers
from mlx_moeflux.checkpoint.quantization import Quantization
from mlx_moeflux.checkpoint.source import Checkpoint, open_checkpoint
from mlx_moeflux.checkpoint.tensors import TensorRef
from mlx_moeflux.errors import CheckpointError, InputError
from mlx_moeflux.experts.budget import (
    KV_POSITIONS,
    WORKING_SET_SHARE,
    Memory,
    Plan,
    format_bytes,
    make_plan,
    parse_budget,
    parse_share,
)
from mlx_moeflux.experts.io.row_cache import row_memory_bytes
from mlx_moeflux.loading.options import LoadOptions
from mlx_moeflux.models import parsed_config

_DRAFTS = "of multi-token prediction, which drafts of 'mtp' load besides"
_FLOATS = ("F32", "F16", "BF16", "F64")
GROUP, TABLE_GROUP = 64, 32


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model.

    blocks: MoE layer id -> bytes of one expert.
    trunk_bytes: On a GPU, with floats in bfloat16.
    embedding_bytes: The part of the trunk of which a token reads one row.
    state_bytes: Key-value cache and recurrent state at `context` positions.
    hidden_size: Width of a token's hidden state.
    table_bytes, table_rows: Tables of n-grams, which stay on disk.
    prediction_bytes: Multi-token prediction on disk, which is not loaded without drafts.
    """

    model_type: str
    num_experts: int
    experts_per_token: int
    blocks: Mapping[int, int]
    trunk_bytes: int
    embedding_bytes: int
    state_bytes: int
    context: int
    hidden_size: int
    table_bytes: int = 0
    table_rows: int = 0
    prediction_bytes: int = 0

    def block(self) -> str:
        """Return the bytes of an expert as a text; where layers differ, their mean and range."""
        each = self.blocks.values()
        mean, ends = (
            format_bytes(sum(each) / len(each)),
            [*map(format_bytes, (min(each), max(each)))],
        )
        return mean if min(each) == max(each) else f"{mean} on average ({' to '.join(ends)})"

    @property
    def expert_bytes(self) -> int:
        """All routed experts."""
        return sum(self.blocks.values()) * self.num_experts

    @property
    def bytes_per_token(self) -> int:
        """Routed experts that a token needs."""
        return sum(self.blocks.values()) * self.experts_per_token


def measure_sizes(
    checkpoint: Checkpoint,
    *,
    context: int | None = None,
    bits: int | None = None,
    group_size: int = GROUP,
) -> Sizes:
    """Sizes from a checkpoint's config and the headers of its tensors.

    context: Tokens of the state; None: as many as loading leaves room for. bits: As if the weights
    were quantised to so many bits in groups of `group_size`.

    Raises:
        MoefluxError: One of its kinds; the checkpoint is not one that loads.
        InputError: `context` is more than the model allows, or `bits` of weights that are quantised
            already.
    """
    name = checkpoint.config_file
    config = parsed_config(checkpoint, strict=False)
    if context is None:
        context = min(KV_POSITIONS, config.max_position_embeddings)
    config.check_context("context", context)
    mapped = checkpoint.mapped(config.name_rules())
    experts = {
        layer: [(refs[0].name, refs[0]) for refs in components.values()]
        for layer, components in mapped.experts.items()
    }
    if not experts:
        raise CheckpointError(f"{name}: there are no routed experts to plan for.")
    trunk = list(mapped.trunk.items())
    if bits is not None and bits not in (2, 3, 4, 5, 6, 8):
        raise InputError(f"weights cannot have {bits} bits; choose 2, 3, 4, 5, 6 or 8.")
    every = [ref for tensors in (trunk, *experts.values()) for _, ref in tensors]
    if bits is not None and any(ref.dtype in ("U32", "U8", *BLOCK_MODES) for ref in every):
        raise InputError(f"{name}: the weights are quantised already; leave --bits out.")
    drafts = {
        stored.name: stored.nbytes
        for ref in checkpoint.prediction(mapped).values()
        for stored in sources_of(ref)
    }
    shards = [shard for parts in mapped.tables.values() for shard in parts]
    embedding = [] if config.tie_word_embeddings else [t for t in trunk if "embed_tokens" in t[0]]
    return Sizes(
        model_type=str(checkpoint.config["model_type"]),
        num_experts=config.num_experts,
        experts_per_token=config.num_experts_per_tok,
        blocks={
            layer: _held(tensors, bits, group_size)
            if bits
            else sum(ref.nbytes for _, ref in tensors)
            for layer, tensors in experts.items()
        },
        trunk_bytes=_held(trunk, bits, group_size),
        embedding_bytes=_held(embedding, bits, group_size),
        state_bytes=config.state_bytes(context),
        context=context,
        hidden_size=config.hidden_size,
        table_bytes=_held([t for s in shards for t in s.items()], bits, TABLE_GROUP),
        table_rows=sum(shard["weight"].shape[0] for shard in shards),
        prediction_bytes=checkpoint.prediction_bytes + sum(drafts.values()),
    )


def open_sizes(
    model: str | os.PathLike[str],
    *,
    revision: str | None = None,
    gguf_file: str | None = None,
    context: int | None = None,
    bits: int | None = None,
) -> Sizes:
    """:func:`measure_sizes` of a directory, or of a hub id without downloading its weights.

    Raises:
        MoefluxError: One of its kinds; the checkpoint cannot be read.
    """
    with resolve_headers(model, revision=revision, gguf_file=gguf_file) as found:
        if isinstance(found, Path):
            checkpoint = open_checkpoint(found, trunk_blocks=True, strict=False)
        else:
            name, config = Path(model), hoisted(found.config)
            checkpoint = Checkpoint(
                directory=name,
                form="safetensors",
                config=config,
                tensors={
                    tensor: TensorRef(tensor, name, 0, dtype, shape)
                    for tensor, (dtype, shape) in found.tensors.items()
                },
                quantization=Quantization.from_config(config),
            )
        return measure_sizes(checkpoint, context=context, bits=bits)


def _held(tensors: list[tuple[str, TensorRef]], bits: int | None, group: int) -> int:
    """Bytes of tensors by name, as a trunk is held: floats in bfloat16, packed bits as they are."""
    total = 0
    for name, ref in tensors:
        weights = prod(ref.shape)
        if bits is not None and len(ref.shape) > 1 and ref.shape[-1] % group == 0:
            routes = name.endswith((".mlp.gate.weight", "shared_expert_gate.weight"))
            total += weights * (8 if routes else bits) // 8 + 4 * weights // group
        else:
            total += 2 * weights if ref.dtype in _FLOATS else ref.nbytes
    return total


DESCRIBED = "described"
"""The back end of :func:`described_memory`."""
MEMORY_GBPS = 100.0
SSD_GBPS = 3.0

LAUNCH_SECONDS = 0.13e-3
"""What a layer costs besides its bytes: launches of kernels, and the waits between them."""
BANDWIDTH_SHARE = 0.6
"""The share of the memory's bandwidth at which kernels read weights."""
SYNC_SECONDS = 0.25e-3
"""What the host's look at a streamed layer's choices costs: published are 0.2 to 0.35 ms."""
COPY_GBPS = 20.0
"""GB/s at which blocks go from pages of files into slots, by several threads."""
ROUTER_SKEW = 0.3
"""A bank with a share of the experts hits by the share to this power; 1 is no preference."""
SYSTEM_BYTES = 5_500_000_000
"""What an idle macOS keeps from programs and pages of files."""

SPREAD = 1.2
"""A range is from the estimate divided by this to the estimate times this. It holds three of five
published rates; as it is printed, its ends are at most a factor of 1.6 apart."""


@dataclass(frozen=True)
class ModelPlan:
    """The answer. ``str()`` shows the arithmetic; :meth:`as_dict` is plain numbers.

    row_bytes: Memory for rows of the tables.
    described: The memory is that of a machine described by its size; else what is available now.
    slow, fast: Tokens per second, the ends of the range around :attr:`estimate`.
    """

    name: str
    sizes: Sizes
    memory_bytes: int
    usable_bytes: int
    fits: bool
    resident: bool
    budget_bytes: int
    slots: int
    slow: float
    fast: float
    ssd_gbps: float
    memory_gbps: float
    why: str
    arithmetic: tuple[str, ...]
    row_bytes: int = 0
    described: bool = False

    @property
    def estimate(self) -> float:
        """Tokens per second, the middle of the range; verdicts go by it."""
        return sqrt(self.slow * self.fast)

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        sizes = self.sizes
        derived = {"expert_bytes": sizes.expert_bytes, "bytes_per_token": sizes.bytes_per_token}
        data = asdict(self)
        data["sizes"] = {**asdict(sizes), **derived, "blocks": dict(sizes.blocks)}
        return data

    def __str__(self) -> str:
        sizes, block = self.sizes, self.sizes.block()
        layers, E, K = len(sizes.blocks), sizes.num_experts, sizes.experts_per_token
        if not self.fits:
            verdict = f"does not fit: {self.why}"
        else:
            verdict = f"{'resident' if self.resident else 'streamed'}: {self.why}"
        usable = format_bytes(self.usable_bytes)
        if self.described:
            memory = f"{in_gib(self.memory_bytes)}, of which {usable} usable with nothing else open"
        else:
            memory = f"{format_bytes(self.memory_bytes)} available now, of which {usable} usable"
        rows = [
            ("model", f"{self.name} ({sizes.model_type})"),
            ("trunk", format_bytes(sizes.trunk_bytes)),
            (
                "experts",
                f"{format_bytes(sizes.expert_bytes)}: {layers} layers x {E} x {block}",
            ),
            *(
                [
                    (
                        "n-grams",
                        f"{format_bytes(sizes.table_bytes)} on disk, "
                        f"{format_bytes(self.row_bytes)} of memory for rows",
                    )
                ]
                if sizes.table_bytes
                else []
            ),
            *(
                [("drafts", f"{format_bytes(sizes.prediction_bytes)} {_DRAFTS}")]
                if sizes.prediction_bytes
                else []
            ),
            ("state", f"{format_bytes(sizes.state_bytes)} at {sizes.context} positions"),
            ("memory", memory),
            ("verdict", verdict),
            (
                "budget",
                f"{format_bytes(self.budget_bytes)}, {self.slots} slots a layer "
                f"({100 * self.slots / E:.0f} %)",
            ),
            (
                "a token",
                f"needs {format_bytes(sizes.bytes_per_token)} of experts: {layers} x {K} x {block}",
            ),
            ("speed", f"{span(self.slow, self.fast)} tokens per second, estimated:"),
            *(("", line) for line in self.arithmetic),
        ]
        return "\n".join(f"{name:8} {text}" for name, text in rows)


def described_memory(value: str | float) -> Memory:
    """Return the memory of a Mac that has so much, such as ``"32GB"``, and nothing else open;
    :func:`~mlx_moeflux.experts.budget.measure_memory` returns what this machine has left.

    Memory is sold in units of 1024: 32GB and 32GiB are the same, and a number counts bytes. The
    working set that macOS recommends to a GPU is 2/3 of it up to 32 GiB and 3/4 above.

    Raises:
        InputError: It is no amount.
    """
    whole = parse_budget(value, 0, what="planned memory")
    if whole is None:
        raise InputError("the memory to plan for must be a number; give one such as 32GB.")
    if isinstance(value, str) and (unit := re.search("([kmgt])b$", value.strip().lower())):
        power = 1 + "kmgt".index(unit[1])
        whole = whole * 1024**power // 1000**power
    part, of = (2, 3) if whole <= 32 << 30 else (3, 4)
    what = f"{WORKING_SET_SHARE} of the {part}/{of} of {in_gib(whole)} that macOS gives a GPU"
    usable = int(WORKING_SET_SHARE * part * whole / of)
    return Memory(DESCRIBED, whole, usable, what, max(0, whole - SYSTEM_BYTES))


def plan_model(
    name: str,
    sizes: Sizes,
    *,
    memory: str | float | Memory,
    expert_memory: str | float = "auto",
    row_memory: str | float = LoadOptions.row_memory,
    ssd_gbps: float = SSD_GBPS,
    memory_gbps: float = MEMORY_GBPS,
) -> ModelPlan:
    """Plan how a machine would load a model, and estimate memory and speed.

    Args:
        memory: As :func:`described_memory` takes it, or what was measured.

    Raises:
        InputError: A number makes no sense.
    """
    if not isinstance(memory, Memory):
        memory = described_memory(memory)
    for what, number in (("ssd_gbps", ssd_gbps), ("memory_gbps", memory_gbps)):
        if not 0 < number < float("inf"):
            raise InputError(f"{what} is {number}; it must be finite and greater than 0.")
    plan = plan_loading(sizes, memory, expert_memory=expert_memory, row_memory=row_memory)
    slots, needs = min(plan.slots.values()), needed_bytes(plan, sizes)
    slow, fast, arithmetic = speeds(
        sizes,
        slots,
        resident=plan.resident,
        ssd_gbps=ssd_gbps,
        memory_gbps=memory_gbps,
        page_cache_bytes=max(0, memory.system_bytes - needs),
    )
    return ModelPlan(
        name=name,
        sizes=sizes,
        memory_bytes=memory.free_bytes,
        usable_bytes=memory.usable_bytes,
        fits=needs <= memory.usable_bytes,
        resident=plan.resident,
        budget_bytes=plan.budget_bytes,
        slots=slots,
        slow=slow,
        fast=fast,
        ssd_gbps=ssd_gbps,
        memory_gbps=memory_gbps,
        why=plan.why,
        arithmetic=arithmetic,
        row_bytes=plan.row_bytes,
        described=memory.backend == DESCRIBED,
    )


def plan_loading(
    sizes: Sizes,
    memory: Memory,
    *,
    expert_memory: str | float,
    row_memory: str | float,
    num_experts: int | None = None,
) -> Plan:
    """Return what loading decides. num_experts: Of each layer on this machine; None: all.

    Raises:
        InputError: An amount cannot be read.
        MemoryBudgetError: It is too small for one token.
    """
    count = sizes.num_experts if num_experts is None else num_experts
    row_bytes = 0
    if sizes.table_rows:
        asked = parse_share(row_memory, sizes.table_bytes)
        each = sizes.table_bytes // sizes.table_rows
        row_bytes = row_memory_bytes(sizes.table_rows, each, asked)
    return make_plan(
        expert_memory,
        sizes.blocks,
        num_experts=count,
        experts_per_token=min(sizes.experts_per_token, count),
        trunk_bytes=sizes.trunk_bytes,
        kv_bytes=sizes.state_bytes,
        memory=memory,
        row_bytes=row_bytes,
    )


def needed_bytes(plan: Plan, sizes: Sizes) -> int:
    """Return the bytes of trunk, rows, state and budget of a plan."""
    return plan.trunk_bytes + plan.row_bytes + sizes.state_bytes + plan.budget_bytes


def typical_hit_rate(share: float) -> float:
    """Return the hit rate of a bank of `share` of the experts, with routers like published ones."""
    return share**ROUTER_SKEW


def fetch_seconds(nbytes: float, held: float, kept: float, ssd_gbps: float) -> tuple[float, float]:
    """Return the seconds to read what is missing of `nbytes` of experts from the disk, and those to
    copy it into slots. held: Share of the experts in the bank. kept: In the bank or in pages of
    files.
    """
    read, copied = ((1 - typical_hit_rate(share)) * nbytes for share in (kept, held))
    return read / (1e9 * ssd_gbps), copied / (1e9 * COPY_GBPS)


def range_around(seconds: float) -> tuple[float, float]:
    """Return the tokens per second of a token in about so many seconds, as a range."""
    return 1 / (SPREAD * seconds), SPREAD / seconds


def speeds(
    sizes: Sizes,
    slots: int,
    *,
    resident: bool,
    ssd_gbps: float,
    memory_gbps: float,
    page_cache_bytes: int = 0,
) -> tuple[float, float, tuple[str, ...]]:
    """Return tokens per second as a range, and the arithmetic.

    slots: Of each layer. page_cache_bytes: Of the experts' files that can stay in memory besides
    the bank; none with a reader that passes by the page cache.
    """
    active = sizes.trunk_bytes - sizes.embedding_bytes + sizes.bytes_per_token
    compute, layers = active / (1e9 * BANDWIDTH_SHARE * memory_gbps), len(sizes.blocks)
    launches = layers * LAUNCH_SECONDS
    seconds = launches + compute
    lines = [
        f"launches {1e3 * launches:.1f} ms: {layers} layers x {1e3 * LAUNCH_SECONDS:g} ms",
        f"compute {1e3 * compute:.1f} ms: {format_bytes(active)} at {BANDWIDTH_SHARE:g} of "
        f"{memory_gbps:g} GB/s of memory",
    ]
    if not resident:
        held = slots / sizes.num_experts
        kept = min(1.0, held + page_cache_bytes / sizes.expert_bytes)
        read, copy = fetch_seconds(sizes.bytes_per_token, held, kept, ssd_gbps)
        sync = layers * SYNC_SECONDS
        seconds += sync + read + copy
        lines += [
            f"synchronisation {1e3 * sync:.1f} ms: {layers} layers x {1e3 * SYNC_SECONDS:g} ms",
            f"copies {1e3 * copy:.1f} ms: {100 * typical_hit_rate(held):.0f} % are in slots, the "
            f"others come at {COPY_GBPS:g} GB/s from pages of files",
            f"reads {1e3 * read:.1f} ms: {100 * typical_hit_rate(kept):.0f} % are in slots or in "
            f"{format_bytes(page_cache_bytes)} of page cache, the others come at {ssd_gbps:g} GB/s "
            "from the disk",
        ]
    lines.append(
        f"together {1e3 * seconds:.1f} ms a token; the range is {SPREAD:g} times more and less"
    )
    return *range_around(seconds), tuple(lines)


def in_gib(nbytes: int) -> str:
    """Return the memory of a machine as a text; three digits in units of 2^30."""
    return f"{nbytes / (1 << 30):.3g} GiB"


def short(number: float) -> str:
    """Two digits that mean something."""
    return f"{float(f'{number:.2g}'):g}"


def span(slow: float, fast: float) -> str:
    """Both speeds in :func:`short` form, or one where they look the same."""
    return " to ".join(dict.fromkeys((short(slow), short(fast))))

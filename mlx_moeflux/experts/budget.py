"""The memory budget of the experts: resident or streamed, and the slots of each layer.

Everything but :func:`measure_memory` is arithmetic on numbers that are passed in. GB is 10^9
bytes, GiB 2^30, ``%`` is of all routed-expert bytes. A budget covers all layers and the reader's
staging buffers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from numbers import Real

from mlx_moeflux.checks import shown
from mlx_moeflux.errors import InputError, MemoryBudgetError
from mlx_moeflux.experts.system_memory import ASSUMED, available_memory

AUTO = "auto"
RESERVE_BYTES = 10**9
"""What `auto` leaves for activations, the tokenizer and the interpreter."""
KV_POSITIONS = 8192
"""Tokens of the state that `auto` leaves room for; as many as it allows of a model that allows
fewer."""

WORKING_SET_SHARE = 0.9
"""Of the working set that Metal recommends, or of what is available, what `auto` may fill."""

_UNITS = {"B": 1}
_UNITS |= {f"{p}B": 1000 ** (i + 1) for i, p in enumerate("KMGT")}
_UNITS |= {f"{p}iB": 1024 ** (i + 1) for i, p in enumerate("KMGT")}
_UNITS_BY_LOWER = {name.lower(): factor for name, factor in _UNITS.items()}
_AMOUNT = re.compile(r"(?P<number>\d{1,30}(?:\.\d{0,30})?|\.\d{1,30})\s*(?P<unit>%|[A-Za-z]*)")


def parse_budget(
    value: str | float, total_bytes: int, *, what: str = "expert memory", least: int = 1
) -> int | None:
    """Bytes of ``"2GB"``, ``"1.5 GiB"``, ``"512MB"``, ``"4096B"``, ``"50%"`` of `total_bytes`, or
    of an int or float, which counts bytes; None for ``"auto"``. total_bytes: 0 where messages are
    to suggest neither of the last two. what: Its name in messages.

    Raises:
        InputError: It is none of these, less than `least`, more than 100 %, or a text without a
            unit.
    """
    unreadable = InputError(
        f"the {what} {shown(value)} is not an amount; give one such as "
        f"{'2GB, 512MiB, 50% or auto' if total_bytes else '32GB or 512MiB'}."
    )
    if isinstance(value, bool) or not isinstance(value, (str, Real)):
        raise unreadable
    if not isinstance(value, str):
        # A fraction of one is somebody's half of the experts, not half a byte.
        if not (1 <= value < float("inf") or value == least == 0):
            raise unreadable
        return int(value)
    text = value.strip()
    if text.lower() == AUTO:
        return None
    match = _AMOUNT.fullmatch(text)
    if match is None:
        raise unreadable
    number, unit = Fraction(match["number"]), match["unit"].lower()
    if number and not unit:
        # A share, if there is something that it could be of: 0.25 and 25 may mean a quarter.
        share = f"{format_share(number)}%" if total_bytes and number <= 100 else f"{text}B"
        units = f"{text}GB, {text}MiB or {share}"
        raise InputError(f"{value!r} has no unit; give one, such as {units}.")
    if number and f"{unit}b" in _UNITS_BY_LOWER:
        raise InputError(f"{value!r} has half a unit; write {text}B.")
    # Fractions: of some sizes 100 % would be a byte less.
    factor = Fraction(total_bytes, 100) if unit == "%" else _UNITS_BY_LOWER.get(unit)
    if factor is None or number * factor < least:
        raise unreadable
    if unit == "%" and number > 100:
        raise InputError(f"the {what} {shown(value)} is more than all; give at most 100%.")
    return int(number * factor)


def format_share(number: Fraction) -> str:
    """Return the percentage that somebody means who writes `number` alone: below 1 a fraction."""
    return f"{float(100 * number if number < 1 else number):g}"


def parse_share(value: str | float, total_bytes: int, *, what: str = "row memory") -> int:
    """Return the bytes of an amount as :func:`parse_budget` takes it, or of 0. what: Its name in
    messages.

    Raises:
        InputError: It is none.
    """
    found = parse_budget(value, total_bytes, what=what, least=0)
    if found is None:
        raise InputError(f"the {what} is 'auto'; give an amount such as 64MB or 10%.")
    return found


def format_bytes(count: float) -> str:
    """Bytes in decimal units with three digits: ``1.77 MB``."""
    for unit, factor in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= factor:
            return f"{min(count, 10**30) / factor:.3g} {unit}"
    return f"{int(count)} B"


def round_up(count: int) -> int:
    """Return the least number of three digits and zeros that is not below `count`.
    :func:`format_bytes` shows all of it, so what is shown of a least budget is enough."""
    step = 10 ** max(0, len(str(count)) - 3)
    return -(-count // step) * step


def smallest_budget(blocks: Mapping[int, int], experts_per_token: int, staging_bytes: int) -> int:
    """The fewest bytes that can work: one token's experts in every layer, and staging.

    blocks: MoE layer id -> bytes of one block.
    """
    return sum(blocks.values()) * experts_per_token + staging_bytes


def slots_for_budget(
    budget_bytes: int,
    blocks: Mapping[int, int],
    *,
    num_experts: int,
    experts_per_token: int,
    staging_bytes: int = 0,
) -> dict[int, int]:
    """MoE layer id -> slots: as many as fit in every layer alike, one more in the first layers.

    Raises:
        MemoryBudgetError: The budget is below :func:`smallest_budget`.
    """
    smallest = smallest_budget(blocks, experts_per_token, staging_bytes)
    if budget_bytes < smallest:
        raise MemoryBudgetError(
            f"{budget_bytes} bytes ({format_bytes(budget_bytes)}) for experts do not hold one "
            f"token's {experts_per_token} experts in each of {len(blocks)} layers; the smallest "
            f"budget that works is {smallest} bytes ({format_bytes(round_up(smallest))})."
        )
    left = budget_bytes - staging_bytes
    even = min(left // sum(blocks.values()), num_experts)
    slots = dict.fromkeys(sorted(blocks), even)
    left -= even * sum(blocks.values())
    for layer in slots:
        if even < num_experts and blocks[layer] <= left:
            slots[layer] += 1
            left -= blocks[layer]
    return slots


@dataclass(frozen=True)
class Memory:
    """The memory of a back end before anything is loaded.

    usable_bytes: Bytes that `auto` may fill with trunk, experts and state. what: A description.
    system_bytes: Bytes of the system's memory that a program and pages of files can share.
    """

    backend: str
    free_bytes: int
    usable_bytes: int
    what: str
    system_bytes: int = 0


def measure_memory() -> Memory:
    """Metal: the recommended working set or what is available now, whichever is less, of which 0.9
    is usable. CUDA: the free memory of the GPU. CPU: what is available now (also under a
    container's limit), of which 0.6 is usable."""
    import mlx.core as mx

    from mlx_moeflux.kernels.runtime import device

    kind = device.kind()
    available, parts = available_memory()
    if kind == "cuda":
        info = mx.device_info(mx.gpu)
        free = int(info.get("free_memory", info.get("total_memory", 0)))
        return Memory("cuda", free, free, "the GPU's free memory", available)
    seen = ", ".join(
        f"{'less ' if nbytes < 0 else ''}{format_bytes(abs(nbytes))} {name}"
        for name, nbytes in parts.items()
    )
    what = "the available memory" + (f" ({seen})" if seen else "")
    if kind == "cpu":
        return Memory("cpu", available, int(0.6 * available), f"0.6 of {what}", available)
    free, most = available, int(mx.device_info(mx.gpu)["max_recommended_working_set_size"])
    if free >= most:
        assumed = [name for name in parts if name.startswith(ASSUMED)]
        free, what = most, ", ".join(["the recommended working set", *assumed])
    return Memory(
        "metal", free, int(WORKING_SET_SHARE * free), f"{WORKING_SET_SHARE} of {what}", available
    )


@dataclass(frozen=True)
class Plan:
    """The placement of the experts. ``str()`` is the line that loading prints.

    slots: MoE layer id -> slots; every expert's when `resident`. row_bytes: Memory for rows of
    tables on disk. usable_bytes: What `auto` may fill. reserved_bytes: The part of it that is for
    none of these. draft_bytes: Of a head of multi-token prediction, its experts' slots included.
    """

    resident: bool
    slots: Mapping[int, int]
    trunk_bytes: int
    expert_bytes: int
    budget_bytes: int
    free_bytes: int
    reader: str
    why: str
    row_bytes: int = 0
    usable_bytes: int = 0
    reserved_bytes: int = 0
    draft_bytes: int = 0

    def __str__(self) -> str:
        kind = "resident" if self.resident else "streamed"
        counts = sorted(set(self.slots.values()))
        slots = "-".join(str(count) for count in (counts[0], counts[-1])[: len(counts)])
        parts = [
            f"experts {kind}",
            f"trunk {format_bytes(self.trunk_bytes)}",
            *([f"n-gram rows {format_bytes(self.row_bytes)}"] if self.row_bytes else []),
            *([f"drafts {format_bytes(self.draft_bytes)}"] if self.draft_bytes else []),
            f"experts {format_bytes(self.expert_bytes)}",
            f"budget {format_bytes(self.budget_bytes)} ({slots} slots a layer)",
            f"free memory {format_bytes(self.free_bytes)}",
        ]
        if not self.resident:
            parts.append(f"reader {self.reader}")
        return f"{', '.join(parts)}: {self.why}"


def make_plan(
    budget: str | float,
    blocks: Mapping[int, int],
    *,
    num_experts: int,
    experts_per_token: int,
    trunk_bytes: int,
    kv_bytes: int,
    memory: Memory,
    reader: str = "pread",
    staging_bytes: int = 0,
    row_bytes: int = 0,
    reserved: str | float = 0,
) -> Plan:
    """Plan the memory of one model on one machine.

    budget: As :func:`parse_budget` takes it. blocks: MoE layer id -> bytes of one block.
    kv_bytes: Key-value cache and state at :data:`KV_POSITIONS`. staging_bytes: The reader's buffers
    for all threads. row_bytes: Memory for rows of tables on disk. reserved: An amount, or a
    percentage of the usable memory, that is left for something else.

    ``auto`` is resident if trunk, `row_bytes`, experts, `kv_bytes`, `reserved` and 1 GB fit in the
    usable memory. Otherwise the experts get half of what is left, so that the page cache has the
    other half.

    Raises:
        InputError: `budget` or `reserved` cannot be read.
        MemoryBudgetError: It is too small for one token.
    """
    expert_bytes = sum(blocks.values()) * num_experts
    reserved_bytes = parse_share(reserved, memory.usable_bytes, what="reserved memory")
    asked = parse_budget(budget, expert_bytes)
    if asked is None:
        others = trunk_bytes + row_bytes + kv_bytes + reserved_bytes + RESERVE_BYTES
        asked, why = _automatic(
            others,
            expert_bytes,
            smallest=smallest_budget(blocks, experts_per_token, staging_bytes),
            memory=memory,
        )
    else:
        why = f"{budget if isinstance(budget, str) else format_bytes(budget)} was asked for"
    resident = asked >= expert_bytes
    if resident:
        slots = dict.fromkeys(sorted(blocks), num_experts)
    else:
        slots = slots_for_budget(
            asked,
            blocks,
            num_experts=num_experts,
            experts_per_token=experts_per_token,
            staging_bytes=staging_bytes,
        )
    return Plan(
        resident=resident,
        slots=slots,
        trunk_bytes=trunk_bytes,
        expert_bytes=expert_bytes,
        budget_bytes=expert_bytes if resident else asked,
        free_bytes=memory.free_bytes,
        reader=reader,
        why=why,
        row_bytes=row_bytes,
        usable_bytes=memory.usable_bytes,
        reserved_bytes=reserved_bytes,
    )


def _automatic(others: int, expert_bytes: int, *, smallest: int, memory: Memory) -> tuple[int, str]:
    """The budget of ``auto`` and the reason. others: all that is not experts."""
    need, usable = format_bytes(others + expert_bytes), format_bytes(memory.usable_bytes)
    if others + expert_bytes <= memory.usable_bytes:
        return (
            expert_bytes,
            f"{need} with states and 1 GB spare fit in {memory.what}, {usable}",
        )
    reason = f"{need} with states and 1 GB spare exceed {memory.what}, {usable}"
    half = (memory.usable_bytes - others) // 2
    if half < smallest:
        return smallest, f"{reason}; the smallest budget that works"
    return half, f"{reason}; half of what is left"

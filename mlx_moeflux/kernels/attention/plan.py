"""Attention on a GPU: how queries, keys and values are laid out in tiles and launched.

An operation makes an :class:`AttentionCall` of its arguments, plans it, once for each, and launches
the plan. :func:`plan_of` takes what an operation asks of the kernels besides; one with tiles or a
kernel of its own makes its plan in its own file.

The shape alone decides between the layouts, each in a ``.metal`` file of its name:
    rows: a simdgroup owns 16 query rows, or 32 of many, everything between loads and result in
    registers.
    shared: a threadgroup owns the queries of all heads that share a KV head, for few tokens, so
    that each key is read once.
    Either over parts of the keys, joined by a second launch, where there are too few query rows
    to fill a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_moeflux.errors import ShapeError
from mlx_moeflux.kernels.runtime.launch_args import filled, ranges
from mlx_moeflux.kernels.runtime.launcher import MetalKernel
from mlx_moeflux.kernels.runtime.pieces import pieces


class AttentionCall(NamedTuple):
    """The arguments on which a launch depends: shapes of q, k and v, and what is computed of them.

    gate: Its width. beside: Further columns of queries and keys, which lie in arrays of their own;
    all heads share those of the keys. tail: Its rows. tokens: The launch is laid out as of so many:
    the whole call if these queries are a piece of one, 1 if each has the bits of a call by itself;
    0: as many as there are.
    """

    name: str
    q: tuple[int, ...]
    k: tuple[int, ...]
    v: tuple[int, ...]
    dtype: mx.Dtype
    causal: bool
    gate: int | None = None
    beside: int = 0
    tail: int = 0
    sinks: bool = False
    tokens: int = 0


def check_tail(call: AttentionCall, k: mx.array, v: mx.array) -> None:
    """Shapes and dtypes of a tail; v: of the keys' further columns where there are such."""
    check_dtypes(call.name, call.dtype, {"tail of k": k, "tail of v": v})
    width = call.beside or call.v[3]
    for name, x, last in (("k", k, call.k[3]), ("v", v, width)):
        if x.shape != (*call.k[:2], call.tail, last) or call.k[2] % call.tail:
            raise ShapeError(
                f"{call.name}: the tail of {name} is {x.shape}, that of {call.k} cannot be."
            )
    if (call.tokens or call.q[2]) != 1:
        raise ShapeError(f"{call.name}: with a tail one token is asked at a time, not {call.q[2]}.")


def check_shapes(call: AttentionCall) -> None:
    """Shapes of queries, keys, values and gate."""
    (B, Hq, _, D), (_, Hkv, S, _), (_, _, _, Dv) = call.q, call.k, call.v
    if call.k != (B, Hkv, S, D) or call.v[:3] != (B, Hkv, S) or Hq % Hkv:
        raise ShapeError(
            f"{call.name}: q {call.q}, k {call.k} and v {call.v} do not fit together; expected "
            "[B, Hq, T, Dh], [B, Hkv, S, Dh] and [B, Hkv, S, Dv]."
        )
    if D % 16 or Dv % 32 or call.beside % 16:
        raise ShapeError(
            f"{call.name}: head sizes {D + call.beside} and {Dv} must be multiples of 16 and 32; "
            "take the reference."
        )
    if call.gate not in (None, Dv, 2 * Dv):
        raise ShapeError(f"{call.name}: the gate is {call.gate} wide, not {Dv} or {2 * Dv}.")


def check_dtypes(name: str, dtype: mx.Dtype, others: dict[str, mx.array | None]) -> None:
    """All as q."""
    for other, array in others.items():
        if array is not None and array.dtype != dtype:
            raise ShapeError(f"{name}: {other} is {array.dtype} and q {dtype}; cast one.")


# Calls of so many tokens at most read each key once for all heads that share it.
FEW_TOKENS = 8
# Threadgroups that a launch of 16 rows each should have; keys that one should see at least; and
# threadgroups of 128 rows from which on a call takes them.
ENOUGH_GROUPS, ENOUGH_SMALL_GROUPS, LEAST_KEYS = 132, 264, 64
ENOUGH_LARGE_GROUPS = 3 * ENOUGH_GROUPS
# Static threadgroup memory, in bytes; and what CUDA gives on demand, on any GPU that has tiles.
MEMORY = {"cuda": 48 * 1024}
MEMORY_ELSEWHERE = 32 * 1024
MEMORY_ON_DEMAND = {"cuda": 99 * 1024}


# What the GATE of a kernel over parts says: parts meet their gate when they are joined. MLX names
# kernels by their templates on CUDA, where a negative number is no name.
_PARTS = 3

# What a call does not have is another array in these inputs, of which nothing is read.
_ROWS = """
    threadgroup T keys[BN * (D1 + D2 + 8)];
    threadgroup T values[BN * (DV + 8)];
    threadgroup T queries[R > 1 ? 16 * R * W * (D1 + D2 + 8) : 8];
    attend_rows<T, D1, D2, DV, HQ, HKV, W, R, BN, QH, CAUSAL, GATE>(
        q, q2, k, k2, v, {gate}, ranges, numbers, {outputs}, keys, values, queries,
        QH ? q_shape[1] : q_shape[2], k_shape[2], threadgroup_position_in_grid,
        threadgroups_per_grid, thread_index_in_threadgroup);
"""
_SHARED = """
    threadgroup T keys[BN * (D1 + D2 + 8)];
    threadgroup T values[LAYOUT == 0 ? BN * (DV + 8) : 8];
    threadgroup T weights[16 * MT * (BN + 8)];
    threadgroup float scores[16 * W * (BN + 1)];
    threadgroup float factors[16 * MT];
    attend_shared<T, D1, D2, DV, HQ, HKV, PACK, MT, W, BN, LAYOUT, TAIL, PAGE, CAUSAL, GATE,
                  CHOSEN, APART>(
        q, q2, k, k2, v, tail_k, tail_v, table, {gate}, ranges, numbers, {outputs},
        keys, values, weights, scores, factors, q_shape[2], k_shape[2],
        threadgroup_position_in_grid, threadgroups_per_grid, thread_index_in_threadgroup,
        int(numbers[1]));
"""


def _rows_memory(sizes: Mapping[str, Any]) -> int:
    """Bytes of the arrays of _ROWS."""
    D, M = sizes["D1"] + sizes["D2"], 16 * sizes["W"] * sizes["R"]
    queries = M * (D + 8) if sizes["R"] > 1 else 8
    return (sizes["BN"] * (D + sizes["DV"] + 16) + queries) * sizes["T"].size


def _kernels(name: str, body: str, inputs: tuple[str, ...], **options: Any) -> list[MetalKernel]:
    """The kernel over all keys, and the one over parts of them."""
    file = f"attention_{name}.metal"
    whole = MetalKernel(
        f"attend_{name}",
        file=file,
        inputs=(*inputs, "gate", "ranges", "numbers"),
        outputs=("y",),
        body=body.format(gate="gate", outputs="y, nullptr, nullptr"),
        **options,
    )
    parts = MetalKernel(
        f"attend_{name}_parts",
        file=file,
        inputs=(*inputs, "ranges", "numbers"),
        outputs=("partial", "stats"),
        body=body.format(gate="nullptr", outputs="nullptr, partial, stats"),
        **options,
    )
    return [whole, parts]


_TENSORS = ("q", "q2", "k", "k2", "v")
# Each: over all keys, over parts.
_KERNELS = {
    "rows": _kernels("rows", _ROWS, _TENSORS, memory=_rows_memory),
    "shared": _kernels("shared", _SHARED, (*_TENSORS, "tail_k", "tail_v", "table")),
}
JOIN = MetalKernel(
    "attend_combine",
    file="attention.metal",
    inputs=("partial", "stats", "gate", "sinks"),
    outputs=("y",),
    body="""
        threadgroup float shared[256 * (N + 1)];
        attend_combine<T, DV, HQ, PACK, GATE, N, SINKS>(
            partial, stats, (const device T*)gate, sinks, y, shared, partial_shape[1],
            partial_shape[2], threadgroup_position_in_grid, thread_index_in_threadgroup);
    """,
)
SHARED = (*_KERNELS["shared"], JOIN)
SDPA_KERNELS = (*_KERNELS["rows"], *SHARED)


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """A launch of a call, ready but for its arrays.

    join: How JOIN joins its parts, if there are parts. replan: Plans a piece of the call. unit: A
    piece has a multiple of so many tokens; None: as :func:`pieces` does.
    """

    call: AttentionCall
    kernel: MetalKernel
    options: dict[str, Any]
    join: dict[str, Any] | None = None
    replan: Callable[[AttentionCall], AttentionPlan] | None = None
    unit: int | None = None


def launch_attention(
    plan: AttentionPlan,
    arrays: tuple[mx.array, ...],
    *,
    scale: float,
    length: int | mx.array | None,
    start: mx.array | None,
    number: int | None = None,
    tail: tuple[mx.array, mx.array] | None = None,
    table: mx.array | None = None,
    gate: mx.array | None = None,
    sinks: mx.array | None = None,
    join: Callable[[mx.array, mx.array], mx.array] | None = None,
) -> mx.array:
    """Launch an attention: ``[B, Hq, T, Dv]``, a view of ``[B, T, Hq, Dv]``; or what `join` makes
    of the results of parts and their statistics, if there are parts.

    arrays: The kernel's first inputs: q, q2, k, k2 and v; q2 and k2 have the further columns.
    number: What the kernel reads beside the scale.
    """
    call = plan.call
    if scale <= 0.0:
        raise ShapeError(f"{call.name}: scale is {scale}; it must be positive.")
    parts = [] if call.tokens or call.q[2] == 1 else _pieces(plan, length)
    if len(parts) > 1 and plan.replan is not None:
        (q, q2, *keys), outputs = arrays, []
        T, last = call.q[2], call.k[2] if length is None else length
        for part in parts:
            shape = (*call.q[:2], part.stop - part.start, call.q[3])
            own = q[:, part] if plan.options["template"].get("QH") else q[:, :, part]
            y = launch_attention(
                plan.replan(call._replace(q=shape, tokens=T)),
                (own, q2[:, :, part] if call.beside else own, *keys),
                scale=scale, start=start, number=number, sinks=sinks,
                length=last - (T - part.stop) if call.causal else last,
                gate=None if gate is None else gate[:, part],
            )  # fmt: skip
            outputs.append(y.swapaxes(1, 2))
        return mx.concatenate(outputs, axis=1).swapaxes(1, 2)
    numbers = filled(scale) if number is None else filled(scale, number)
    bounds = ranges(call.q[0], call.k[2], length, start)
    if plan.kernel in _KERNELS["shared"]:
        k = arrays[2]
        arrays = (*arrays, *(tail or (k, k)), bounds if table is None else table)
    if plan.join is None:
        gates = arrays[0] if gate is None else gate
        (y,) = plan.kernel(*arrays, gates, bounds, numbers, **plan.options)
    else:
        partial, stats = plan.kernel(*arrays, bounds, numbers, **plan.options)
        if join is not None:
            return join(partial, stats)
        others = (partial if array is None else array for array in (gate, sinks))
        (y,) = JOIN(partial, stats, *others, **plan.join)
    return y.swapaxes(1, 2)


def _pieces(plan: AttentionPlan, length: int | mx.array | None) -> list[slice]:
    """Return the tokens of each launch, see :mod:`~mlx_moeflux.kernels.runtime.pieces`. A block of
    rows shares its keys out among parts, so a piece has whole blocks unless there is one part."""
    call = plan.call
    keys = length if isinstance(length, int) else call.k[2]
    width = call.q[3] + call.beside + call.v[3]
    return pieces(call.q[2], operations_of_a_token(call.q, keys, width), plan.unit)


def operations_of_a_token(q: tuple[int, ...], keys: int, width: int) -> int:
    """Return how many a token of all sequences has. width: Of keys and values together."""
    return 2 * q[0] * q[1] * keys * width


@functools.lru_cache(maxsize=4096)
def plan_of(
    backend_name: str, call: AttentionCall, *, seen: int | None = None, **own: int
) -> AttentionPlan:
    """Checks shapes and lays a launch out, once for each.

    seen: How many keys the queries see at most; None: all that there is room for. own: Template
    arguments of an operation, for the kernel that has them.
    """
    check_shapes(call)
    sizes = rows_sizes(backend_name, call)
    name = "shared" if sizes is None else "rows"
    sizes = sizes or shared_sizes(backend_name, call)
    sizes |= {argument: value for argument, value in own.items() if argument in sizes}
    replan = functools.partial(plan_of, backend_name, seen=seen, **own)
    return replace(tiled_plan(call, name, sizes, seen or call.k[2]), replan=replan)


def tiled_plan(
    call: AttentionCall, name: str, sizes: dict[str, int], capacity: int
) -> AttentionPlan:
    """Return the plan for tiles of one kernel; the fewer blocks of them, the more parts the keys
    have, of which there are `capacity`."""
    (B, Hq, T, D1), Hkv, Dv = call.q, call.k[1], call.v[3]
    pack = sizes.get("PACK", 1)
    height = 16 * (sizes["W"] * sizes["R"] if name == "rows" else sizes["MT"])
    rows, groups = pack * T, B * Hq // pack
    blocks, blocks_of_one = -(-rows // height), -(-pack * (call.tokens or T) // height)
    enough = ENOUGH_SMALL_GROUPS if height == 16 else ENOUGH_GROUPS
    parts = max(1, min(enough // (groups * blocks_of_one), -(-capacity // LEAST_KEYS)))
    split, gate = parts > 1 or call.sinks, (call.gate or 0) // Dv
    template = {"T": call.dtype, "D1": D1, "DV": Dv, "HQ": Hq, "HKV": Hkv, **sizes}
    template |= {"CAUSAL": call.causal, "GATE": _PARTS if split else gate}
    threads = 32 * sizes["W"]
    options = {
        "template": template,
        "grid": (threads * parts, groups, blocks),
        "threadgroup": (threads, 1, 1),
    }
    if not split:
        result = {"output_shapes": [(B, T, Hq, Dv)], "output_dtypes": [call.dtype]}
        return AttentionPlan(call, _KERNELS[name][0], options | result)
    options["output_shapes"] = [(groups, parts, rows, Dv), (groups, parts, rows, 2)]
    options["output_dtypes"] = [mx.float32, mx.float32]
    return AttentionPlan(call, _KERNELS[name][1], options, join_options(call, pack, gate))


def join_options(call: AttentionCall, pack: int, gate: int) -> dict[str, Any]:
    """Return the launch that joins the parts of a call, in which `pack` heads lie together."""
    B, Hq, T, Dv = *call.q[:3], call.v[3]
    width = 4 if Dv % 128 == 0 else 1
    return {
        "template": {
            **{"T": call.dtype, "DV": Dv, "HQ": Hq, "PACK": pack, "GATE": gate, "N": width},
            "SINKS": call.sinks,
        },
        "grid": (256 * (Dv // (32 * width)), pack * T, B * Hq // pack),
        "threadgroup": (256, 1, 1),
        "output_shapes": [(B, T, Hq, Dv)],
        "output_dtypes": [call.dtype],
    }


def rows_sizes(backend_name: str, call: AttentionCall) -> dict[str, int] | None:
    """Return tile sizes and options of ``attend_rows``; None if ``attend_shared`` computes such a
    call.

    Raises:
        ShapeError: No tile fits.
    """
    (B, Hq, T, D1), Dv = call.q, call.v[3]
    T, D, size = call.tokens or T, D1 + call.beside, call.dtype.size
    if T <= FEW_TOKENS:
        return None
    own = {"D2": call.beside, "QH": 0}
    # Two tiles of rows for each simdgroup, so that keys and values are fetched half as often, take
    # a large block's memory and all registers.
    large = {"W": 4, "R": 2, "BN": 64, **own}
    needed = _rows_memory({**large, "T": call.dtype, "D1": D1, "DV": Dv})
    if (
        size == 2
        and 64 < Dv <= 128
        and B * Hq * (T // 128) >= ENOUGH_LARGE_GROUPS
        and needed <= MEMORY_ON_DEMAND.get(backend_name, 0)
    ):
        return large
    # Sums of 16 rows and queries must fit into a lane's registers.
    registers = Dv // 2 + D // 4 * size // 2
    if registers > (192 if backend_name == "cuda" else 96):
        return None
    limit = memory_of(backend_name)
    for keys in (64, 32, 16):
        fits = keys * (D + Dv + 16) * size <= limit
        # More than 16 accumulators of scores beside a wide head's sums would spill.
        if fits and (keys < 64 or registers <= 96):
            return {"W": 4, "R": 1, "BN": keys, **own}
    raise _too_large(call, limit)


# Row tiles, simdgroups and keys of a shared tile, the best first.
SHARED_TILES = ((4, 4, 32), (2, 4, 32), (1, 4, 32), (4, 4, 16), (2, 4, 16), (1, 4, 16))


def shared_sizes(
    backend_name: str,
    call: AttentionCall,
    *,
    tiles: tuple[tuple[int, int, int], ...] = SHARED_TILES,
    layouts: tuple[int, ...] = (0, 1),
    pack: int | None = None,
) -> dict[str, int]:
    """Return tile sizes and options of ``attend_shared``.

    tiles: The choice, the best first. layouts: Where values lie, see the kernel. pack: Heads of a
    threadgroup; None: of few tokens all that share a KV head.

    Raises:
        ShapeError: No tile fits.
    """
    (_, Hq, T, D1), Dv, size = call.q, call.v[3], call.dtype.size
    T, D, limit = call.tokens or T, D1 + call.beside, memory_of(backend_name)
    if pack is None:
        pack = Hq // call.k[1] if T <= FEW_TOKENS else 1
    rows = pack * T
    for layout in layouts:
        for MT, W, keys in tiles:
            # Four bytes a register of a lane: queries of a row tile and sums.
            registers = -(-D // 16 * MT // W) * 2 * size + MT * Dv // W // 2
            if registers > 200 or (MT > 1 and rows <= 8 * MT) or (layout == 1 and Dv > D):
                continue
            M = 16 * MT
            values = keys * (Dv + 8) if layout == 0 else 8
            needed = (keys * (D + 8) + values + M * (keys + 8)) * size
            needed += 16 * W * (keys + 1) * 4 + M * 4
            if needed <= limit:
                sizes = {"MT": MT, "W": W, "BN": keys, "LAYOUT": layout, "D2": call.beside}
                sizes |= {"PACK": pack, "TAIL": call.tail, "PAGE": 0, "CHOSEN": False}
                return sizes | {"APART": call.tokens == 1}
    raise _too_large(call, limit)


def memory_of(backend_name: str) -> int:
    """Bytes of threadgroup memory that a kernel may declare."""
    return MEMORY.get(backend_name, MEMORY_ELSEWHERE)


def _too_large(call: AttentionCall, limit: int) -> ShapeError:
    return ShapeError(
        f"{call.name}: head sizes {call.q[3] + call.beside} and {call.v[3]} of {call.dtype} do not "
        f"fit into registers and {limit} bytes of threadgroup memory; take the reference."
    )

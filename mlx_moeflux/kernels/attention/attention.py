"""Causal attention over a cache: softmax(q k^T scale) v, optionally times sigmoid(gate).

Shapes:
    q: ``[B, Hq, T, Dh]``; k: ``[B, Hkv, S, Dh]``; v: ``[B, Hkv, S, Dv]``. Query head h reads KV
    head h // (Hq / Hkv). Several rows of one sequence: q ``[R, Hq, 1, Dh]``, `length` int32
    ``[R]``, one more from row to row, `gate` of R; k, v, tail and start of one sequence.
    mask: None (every query sees every key), "causal" (query t sees keys up to length - T + t),
    or bool ``[B or 1, 1, T, length]``, with an int `length` or None and without `start`.
    length: keys in use, an int or int32 ``[B]``; None: all S. With it k and v may be whole
    preallocated buffers.
    start: int32 ``[B]``, each sequence's first key (left padding); None: 0.
    tail: keys and values ``[B, Hkv, R, D]`` of the newest rows, or None: row s of a sequence of
    `length`, which is at most S, is row s - s0 of them from s0 = (length - 1) // R * R on, and of
    k and v before. With R = 4 and length 11, rows 8 to 10 are rows 0 to 2 of the tail.
    sinks: ``[Hq]`` or None: logits that take part in each head's softmax, without a value.
    gate: ``[B, T, Hq, Dv]``, or ``[B, T, Hq, 2 Dv]`` whose second halves are the gate.
    returns: ``[B, Hq, T, Dv]`` in the dtype of q, softmax in float32.

Layouts of :func:`sdpa_fused`, once :mod:`~mlx_moeflux.kernels.registry` has chosen it. The shape
alone decides; each is in a ``.metal`` file of its name:
    rows: a simdgroup owns 16 query rows, or 32 of many, everything between loads and result in
    registers.
    shared: a threadgroup owns the queries of all heads that share a KV head, for few tokens, so
    that each key is read once.
    Either over parts of the keys, joined by a second launch, where there are too few query rows
    to fill a GPU.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx

from mlx_moeflux.errors import ShapeError
from mlx_moeflux.kernels import examples
from mlx_moeflux.kernels.cpu import blas
from mlx_moeflux.kernels.examples import Arguments, Normal, Sizes
from mlx_moeflux.kernels.mla import latent_token
from mlx_moeflux.kernels.operation import Implementation, Operation
from mlx_moeflux.kernels.proof import Proof
from mlx_moeflux.kernels.runtime.launch_args import filled, ranges
from mlx_moeflux.kernels.runtime.launcher import MetalKernel, backend
from mlx_moeflux.kernels.runtime.pieces import pieces


class Call(NamedTuple):
    """The arguments on which a launch depends: shapes of q, k, v, widths of gate and rotary parts.

    expanded: Heads share the rotary part, and each has keys and values of its own; else values are
    the first columns of the keys. q_heads: Queries have the layout of a projection's result,
    ``[B, T, q_heads, q[3] + rotary]``, and `q` is the shape of those in use; 0: `q` is their
    layout. chosen: How many blocks of `page` keys the queries see at most, the last of them not
    whole; 0: all keys. apart: Each token has the bits of a call by itself. tokens: Of the whole
    call if these queries are a piece of one; else 0.
    """

    name: str
    q: tuple[int, ...]
    k: tuple[int, ...]
    v: tuple[int, ...]
    gate: int | None
    dtype: mx.Dtype
    causal: bool
    rotary: int = 0
    tail: int = 0
    page: int = 0
    expanded: bool = False
    q_heads: int = 0
    sinks: bool = False
    chosen: int = 0
    apart: bool = False
    tokens: int = 0

    def laid_out(self) -> Call:
        """Return the call whose tiles this one takes: of one of the tokens that are apart, or the
        whole call of a piece; else itself."""
        tokens = 1 if self.apart else self.tokens
        return self._replace(q=(*self.q[:2], tokens, self.q[3])) if tokens else self


def check_tail(call: Call, k: mx.array, v: mx.array) -> None:
    """Shapes and dtypes of a tail; v: of the rotary keys where there are such."""
    check_dtypes(call.name, call.dtype, {"tail of k": k, "tail of v": v})
    width = call.rotary or call.v[3]
    for name, x, last in (("k", k, call.k[3]), ("v", v, width)):
        if x.shape != (*call.k[:2], call.tail, last) or call.k[2] % call.tail:
            raise ShapeError(
                f"{call.name}: the tail of {name} is {x.shape}, that of {call.k} cannot be."
            )
    if call.laid_out().q[2] != 1:
        raise ShapeError(f"{call.name}: with a tail one token is asked at a time, not {call.q[2]}.")


def check_shapes(call: Call) -> None:
    """Shapes of queries, keys, values and gate."""
    (B, Hq, _, D), (_, Hkv, S, _), (_, _, _, Dv) = call.q, call.k, call.v
    if call.k != (B, Hkv, S, D) or call.v[:3] != (B, Hkv, S) or Hq % Hkv:
        raise ShapeError(
            f"{call.name}: q {call.q}, k {call.k} and v {call.v} do not fit together; expected "
            "[B, Hq, T, Dh], [B, Hkv, S, Dh] and [B, Hkv, S, Dv]."
        )
    if D % 16 or Dv % 32 or call.rotary % 16:
        raise ShapeError(
            f"{call.name}: head sizes {D + call.rotary} and {Dv} must be multiples of 16 and 32; "
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
# Static threadgroup memory, in bytes; what CUDA gives on demand, on any GPU that has tiles; and, by
# GPU, more for a token's latent attention, which alone was measured with it.
MEMORY = {"cuda": 48 * 1024}
MEMORY_ELSEWHERE = 32 * 1024
MEMORY_ON_DEMAND = {"cuda": 99 * 1024}
MORE_ON_DEMAND = {"sm_90": 227 * 1024}


def causal_sdpa(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    scale: float,
    mask: mx.array | str | None,
    length: int | mx.array | None = None,
    start: mx.array | None = None,
    tail: tuple[mx.array, mx.array] | None = None,
    gate: mx.array | None = None,
    sinks: mx.array | None = None,
) -> mx.array:
    """Stock MLX. Rows past an int `length` are not read; past an array they are, and masked. A
    query that sees no key attends to its own.

    Raises:
        ShapeError: A mask as an array beside `start` or a length on the device; a tail without
            length.
    """
    if isinstance(mask, mx.array) and (start is not None or isinstance(length, mx.array)):
        raise ShapeError("sdpa: a mask as an array says what is seen; leave out start, length.")
    if tail is not None:
        if length is None:
            raise ShapeError("sdpa: a tail needs the length.")
        k, v = (joined(x, end, length) for x, end in zip((k, v), tail, strict=True))
    if k.shape[0] == 1 < q.shape[0] and isinstance(length, mx.array):
        k, v = (mx.broadcast_to(x, (q.shape[0], *x.shape[1:])) for x in (k, v))
    if isinstance(length, int) and length < k.shape[2]:
        k, v = k[:, :, :length], v[:, :, :length]
    if start is not None or isinstance(length, mx.array):
        mask = _visible(q, k, causal=mask == "causal", length=length, start=start)
    sinks = None if sinks is None else sinks.astype(q.dtype)
    parts = []
    if q.shape[2] > 1:
        parts = pieces(q.shape[2], _operations(q.shape, k.shape[2], q.shape[3] + v.shape[3]))
    if len(parts) > 1:
        y = mx.concatenate([_piece(q, k, v, part, scale, mask, sinks) for part in parts], axis=2)
    else:
        y = mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask, sinks=sinks)
    if gate is None:
        return y
    gate = gate[..., gate.shape[-1] - v.shape[-1] :]
    return y * mx.sigmoid(gate.swapaxes(1, 2))


def _operations(q: tuple[int, ...], keys: int, width: int) -> int:
    """Return those of a token. width: Of keys and values together."""
    return 2 * q[0] * q[1] * keys * width


def _piece(q, k, v, part: slice, scale: float, mask: Any, sinks: mx.array | None) -> mx.array:
    """Stock attention of some of the queries."""
    if isinstance(mask, mx.array):
        mask = mask[..., part, :]
    elif mask is not None:
        seen = k.shape[2] - q.shape[2] + part.stop
        k, v = k[:, :, :seen], v[:, :, :seen]
    q = q[:, :, part]
    return mx.fast.scaled_dot_product_attention(q, k, v, scale=scale, mask=mask, sinks=sinks)


def joined(buffer: mx.array, tail: mx.array, length: int | mx.array) -> mx.array:
    """The buffer with the rows of the tail in their places."""
    R, row = tail.shape[2], mx.arange(buffer.shape[2])
    length = mx.array(length).reshape(-1, 1)
    newest = (row >= (length - 1) // R * R)[:, None, :, None]
    index = (row % R)[None, None, :, None]
    return mx.where(newest, mx.take_along_axis(tail, index, axis=2), buffer)


def _visible(q, k, *, causal, length, start) -> mx.array:
    """bool [B, 1, T, S]; a query before its sequence's start sees its own key only."""
    T, S = q.shape[2], k.shape[2]
    past = mx.array(S if length is None or isinstance(length, int) else length)
    past = past.reshape(-1, 1, 1, 1)
    key = mx.arange(S)
    query = past - T + mx.arange(T)[:, None]
    mask = key <= query if causal else mx.broadcast_to(key < past, (past.shape[0], 1, T, S))
    if start is not None:
        mask = (mask & (key >= start.reshape(-1, 1, 1, 1))) | (key == query)
    return mask


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


def sdpa_fused(q, k, v, *, scale, mask, length=None, start=None, tail=None, gate=None, sinks=None):
    """:func:`causal_sdpa` without scores in device memory; rows outside a sequence's range are
    never read, and a query that sees no key gets zeros. A mask that is an array goes to the
    reference.

    Raises:
        ShapeError: Shapes or dtypes do not fit together, Dh is no multiple of 16 or Dv of 32, or
            they are too large for threadgroup memory.
        UnsupportedError: MLX drives no GPU.
    """
    if isinstance(mask, mx.array):
        return causal_sdpa(
            q, k, v, scale=scale, mask=mask, length=length, start=start, tail=tail, gate=gate,
            sinks=sinks,
        )  # fmt: skip
    apart = False
    if k.shape[0] == 1 < q.shape[0] and isinstance(length, mx.array):
        apart, q, length = True, q.swapaxes(0, 2), length[-1:]
        gate = None if gate is None else gate.swapaxes(0, 1)
    call = Call(
        "sdpa", q.shape, k.shape, v.shape, None if gate is None else gate.shape[-1], q.dtype,
        apart or mask is not None, tail=0 if tail is None else tail[0].shape[2],
        sinks=sinks is not None, apart=apart,
    )  # fmt: skip
    check_dtypes("sdpa", q.dtype, {"k": k, "v": v, "gate": gate})
    if tail is not None:
        check_tail(call, *tail)
    options = {"scale": scale, "length": length, "start": start}
    y = run(call, q, k, v, **options, tail=tail, gate=gate, sinks=sinks)
    return y.swapaxes(0, 2) if apart else y


@dataclass(frozen=True, slots=True)
class Plan:
    """A launch, ready but for its arrays; join: how JOIN joins its parts, if there are parts."""

    kernel: MetalKernel
    options: dict[str, Any]
    join: dict[str, Any] | None = None


def run(
    call: Call,
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    scale: float,
    length: int | mx.array | None,
    start: mx.array | None,
    rotary: tuple[mx.array, mx.array] | None = None,
    tail: tuple[mx.array, mx.array] | None = None,
    table: mx.array | None = None,
    gate: mx.array | None = None,
    sinks: mx.array | None = None,
    join: Callable[[mx.array, mx.array], mx.array] | None = None,
    first_head: int = 0,
) -> mx.array:
    """Launch an attention: ``[B, Hq, T, Dv]``, a view of ``[B, T, Hq, Dv]``; or what `join` makes
    of the results of parts and their statistics, if there are parts. rotary: Further columns of
    queries and keys. first_head: The first that is meant of `q_heads`, see :class:`Call`."""
    if scale <= 0.0:
        raise ShapeError(f"{call.name}: scale is {scale}; it must be positive.")
    plan = plan_of(backend().name, call)
    parts = [] if call.tokens or call.q[2] == 1 else _pieces(call, plan, length)
    if len(parts) > 1:
        T, outputs, last = call.q[2], [], call.k[2] if length is None else length
        for part in parts:
            own = q[:, part] if call.q_heads else q[:, :, part]
            piece = (*call.q[:2], part.stop - part.start, call.q[3])
            y = run(
                call._replace(q=piece, tokens=T), own, k, v, scale=scale, start=start, sinks=sinks,
                length=last - (T - part.stop) if call.causal else last,
                rotary=rotary and (rotary[0][:, :, part], rotary[1]),
                gate=None if gate is None else gate[:, part], first_head=first_head,
            )  # fmt: skip
            outputs.append(y.swapaxes(1, 2))
        return mx.concatenate(outputs, axis=1).swapaxes(1, 2)
    numbers = filled(scale)
    if call.q_heads:
        numbers = filled(scale, first_head)
    elif table is not None:
        numbers = filled(scale, table.shape[1])
    bounds = ranges(call.q[0], call.k[2], length, start)
    q2, k2 = rotary or (q, k)
    inputs = [q, q2, k, k2, v]
    if plan.kernel is latent_token.KERNEL and tail is not None:
        inputs = [q, q2, k, k2, *tail]
    elif plan.kernel in _KERNELS["shared"]:
        inputs += [*(tail or (k, k)), bounds if table is None else table]
    if plan.join is None:
        gates = q if gate is None else gate
        (y,) = plan.kernel(*inputs, gates, bounds, numbers, **plan.options)
    else:
        partial, stats = plan.kernel(*inputs, bounds, numbers, **plan.options)
        if join is not None:
            return join(partial, stats)
        others = (partial if array is None else array for array in (gate, sinks))
        (y,) = JOIN(partial, stats, *others, **plan.join)
    return y.swapaxes(1, 2)


def _pieces(call: Call, plan: Plan, length: int | mx.array | None) -> list[slice]:
    """Return the tokens of each launch, see :mod:`~mlx_moeflux.kernels.runtime.pieces`. A block of
    rows shares its keys out among parts, so a piece has whole blocks unless there is one part."""
    T, keys = call.q[2], length if isinstance(length, int) else call.k[2]
    unit = None
    if call.rotary and not call.expanded:
        # A block has rows of several heads, and no piece has whole blocks.
        unit = T if plan.join is not None else 1
    width = call.q[3] + call.rotary + call.v[3]
    return pieces(T, _operations(call.q, keys, width), unit)


@functools.lru_cache(maxsize=4096)
def plan_of(backend_name: str, call: Call) -> Plan:
    """Checks shapes and lays a launch out, once for each."""
    check_shapes(call)
    B, Hq, T, D1 = call.q
    Hkv, Dv, capacity = call.k[1], call.v[3], call.chosen * call.page or call.k[2]
    limit = MEMORY.get(backend_name, MEMORY_ELSEWHERE)
    demand = on_demand_of_latents(backend_name)
    token = latent_token.launch_of(
        limit, demand, call.q, call.k, call.rotary, call.tail, call.dtype
    )
    if token is not None and not call.expanded:
        return Plan(latent_token.KERNEL, token, join_options(call, Hq, 0))
    one = call.laid_out()
    name, tile = _tile(backend_name, one, limit)
    if tile is None:
        raise ShapeError(
            f"{call.name}: head sizes {D1 + call.rotary} and {Dv} of {call.dtype} do not fit into "
            f"registers and {limit} bytes of threadgroup memory; take the reference."
        )
    pack = tile.get("PACK", 1)
    rows, groups = pack * T, B * Hq // pack
    height = 16 * (tile["W"] * tile["R"] if name == "rows" else tile["MT"])
    blocks, blocks_of_one = -(-rows // height), -(-pack * one.q[2] // height)
    enough = ENOUGH_SMALL_GROUPS if height == 16 else ENOUGH_GROUPS
    parts = max(1, min(enough // (groups * blocks_of_one), -(-capacity // LEAST_KEYS)))
    split, gate = parts > 1 or call.sinks, (call.gate or 0) // Dv
    template = {"T": call.dtype, "D1": D1, "DV": Dv, "HQ": Hq, "HKV": Hkv, **tile}
    if name != "rows":
        template |= {"TAIL": call.tail, "PAGE": call.page, "CHOSEN": call.chosen > 0}
        template["APART"] = call.apart
    template |= {"CAUSAL": call.causal, "GATE": _PARTS if split else gate}
    threads = 32 * tile["W"]
    options = {
        "template": template,
        "grid": (threads * parts, groups, blocks),
        "threadgroup": (threads, 1, 1),
    }
    if not split:
        result = {"output_shapes": [(B, T, Hq, Dv)], "output_dtypes": [call.dtype]}
        return Plan(_KERNELS[name][0], options | result)
    options["output_shapes"] = [(groups, parts, rows, Dv), (groups, parts, rows, 2)]
    options["output_dtypes"] = [mx.float32, mx.float32]
    return Plan(_KERNELS[name][1], options, join_options(call, pack, gate))


def on_demand_of_latents(backend_name: str) -> int:
    """Bytes of threadgroup memory that ``attend_latents`` may ask for."""
    least = MEMORY_ON_DEMAND.get(backend_name, 0)
    if not least or not mx.cuda.is_available():
        return least
    architecture = str(mx.device_info(mx.gpu).get("architecture", ""))
    return max(least, MORE_ON_DEMAND.get(architecture, 0))


def join_options(call: Call, pack: int, gate: int) -> dict[str, Any]:
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


def _tile(backend_name: str, call: Call, limit: int) -> tuple[str, dict[str, int] | None]:
    """Name of the kernels and tile sizes; None if nothing fits."""
    D, Dv, T, Hq, Hkv = call.q[3] + call.rotary, call.v[3], call.q[2], call.q[1], call.k[1]
    size = call.dtype.size
    if call.rotary and not call.expanded:
        sizes = _LATENT_TILES
        if Hq * T >= _MANY_ROWS and backend_name == "cuda":
            sizes = ((4, 8, 16), *sizes)
        tiles = _shared_tiles(sizes, D, Dv, Hq * T, size, layouts=(2,))
        more = {"D2": call.rotary, "PACK": Hq}
        return "shared", _first_that_fits(tiles, limit, more)
    # Beside rotary ones attend_rows takes queries that lie as their projection gives them.
    many = T > FEW_TOKENS and bool(call.q_heads) == call.expanded
    # Two tiles of rows for each simdgroup, so that keys and values are fetched half as often, take
    # a large block's memory and all registers.
    own = {"D2": call.rotary, "QH": call.q_heads}
    large = {"W": 4, "R": 2, "BN": 64, **own}
    needed = _rows_memory({**large, "T": call.dtype, "D1": call.q[3], "DV": Dv})
    if (
        many
        and size == 2
        and 64 < Dv <= 128
        and call.q[0] * Hq * (T // 128) >= ENOUGH_LARGE_GROUPS
        and needed <= MEMORY_ON_DEMAND.get(backend_name, 0)
    ):
        return "rows", large
    # Sums of 16 rows and queries must fit into a lane's registers.
    registers = Dv // 2 + D // 4 * size // 2
    if many and registers <= (192 if backend_name == "cuda" else 96):
        for keys in (64, 32, 16):
            fits = keys * (D + Dv + 16) * size <= limit
            # More than 16 accumulators of scores beside a wide head's sums would spill.
            if fits and (keys < 64 or registers <= 96):
                return "rows", {"W": 4, "R": 1, "BN": keys, **own}
        return "rows", None
    pack = Hq // Hkv if T <= FEW_TOKENS else 1
    tiles = _shared_tiles(_SHARED_TILES, D, Dv, pack * T, size, layouts=(0, 1))
    return "shared", _first_that_fits(tiles, limit, {"D2": call.rotary, "PACK": pack})


def _first_that_fits(tiles, limit, more) -> dict[str, int] | None:
    return next((tile | more for needed, tile in tiles if needed <= limit), None)


# Row tiles, simdgroups and keys of a shared tile, the best first.
_SHARED_TILES = ((4, 4, 32), (2, 4, 32), (1, 4, 32), (4, 4, 16), (2, 4, 16), (1, 4, 16))
_LATENT_TILES = ((1, 4, 32), (2, 8, 16), (1, 4, 16))
# So many rows fill a GPU by blocks of 64; only CUDA gives a lane the registers.
_MANY_ROWS = 64 * ENOUGH_GROUPS


def _shared_tiles(sizes, D: int, Dv: int, rows: int, size: int, *, layouts: tuple[int, ...]):
    """Tilings of the shared kernels, the best first: (bytes of threadgroup memory, sizes)."""
    for layout in layouts:
        for MT, W, keys in sizes:
            # Four bytes a register of a lane: queries of a row tile and sums.
            registers = -(-D // 16 * MT // W) * 2 * size + MT * Dv // W // 2
            if registers > 200 or (MT > 1 and rows <= 8 * MT) or (layout == 1 and Dv > D):
                continue
            M = 16 * MT
            values = keys * (Dv + 8) if layout == 0 else 8
            needed = (keys * (D + 8) + values + M * (keys + 8)) * size
            needed += 16 * W * (keys + 1) * 4 + M * 4
            yield needed, {"MT": MT, "W": W, "BN": keys, "LAYOUT": layout}


# What stock MLX may allocate for scores: it keeps those of wide heads, of all queries and keys.
MOST_SCORES = 128 << 20


def is_timed(q: mx.array, k: mx.array, *others: Any, **options: Any) -> bool:
    """Return True for prompts whose scores are few. One token has the bits of attention over pages,
    of tokens that are chosen, and of rows of one sequence."""
    length = options.get("length")
    if q.shape[2] == 1 or isinstance(length, mx.array):
        return False
    keys = k.shape[2] if length is None else length
    return math.prod(q.shape[:3]) * keys * q.dtype.size <= MOST_SCORES


def call_of_size(s: Sizes, n: int, x: Normal, Dh: int, Dv: int, Hq: int, Hkv: int) -> Arguments:
    rows = s.keys + -(-n // s.step) * s.step  # buffers are larger than what they hold
    keys, values = x(s.B, Hkv, rows, Dh), x(s.B, Hkv, rows, Dv)
    options = {"scale": Dh**-0.5, "mask": None if n == 1 else "causal", "length": s.keys + n}
    return (x(s.B, Hq, n, Dh), keys, values), options


def _example(s: Sizes, n: int, x: Normal) -> Arguments:
    args, options = call_of_size(s, n, x, s.Dh, s.Dhv, s.Hq, s.Hkv)
    return args, options | {"start": mx.array([0, 1]), "gate": x(s.B, n, s.Hq, 2 * s.Dhv)}


def _cases(example: Arguments) -> Iterator[tuple[str, Arguments]]:
    """Yield what traced steps on GPUs and other callers pass too: a tail, a length on the device, a
    mask as an array, queries that are padding."""
    (q, k, v), every = example
    T, length = q.shape[2], every["length"]
    plain = {name: every[name] for name in ("scale", "mask", "length")}
    cases = [every, plain | {"gate": every["gate"]}, plain]
    if T > 1:
        visible = mx.random.uniform(shape=(1, 1, T, length)) < 0.5
        visible[..., 0] = True
        # The first query of the second sequence is padding.
        cases += [plain | {"mask": visible}, plain | {"start": mx.array([0, length - T + 1])}]
    else:
        rows = next(n for n in (8, 4, 2, 1) if k.shape[2] % n == 0)
        tail = tuple(examples.normal(q.dtype)(*x.shape[:2], rows, x.shape[3]) for x in (k, v))
        cases += [every | {"tail": tail, "length": mx.array([length], dtype=mx.int32)}]
    for options in cases:
        yield _given(options), ((q, k, v), options)


def _given(options: dict[str, Any]) -> str:
    """The arguments of a call of attention that change what is computed."""
    names = [name for name in ("start", "tail", "gate") if name in options]
    mask, length = options["mask"], options["length"]
    shown = "an array" if isinstance(mask, mx.array) else mask
    on_device = ["length on the device"] if isinstance(length, mx.array) else []
    return ", ".join([f"mask {shown}", *names, *on_device])


def _without_padding(call: Arguments, y: mx.array) -> mx.array:
    """Return the result with 0 for queries of padding if they have finite numbers: later layers
    compute with them."""
    (q, *_), options = call
    if "start" not in options or not isinstance(y, mx.array):
        return y
    T = q.shape[2]
    query = options["length"] - T + mx.arange(T)
    padding = (query < options["start"].reshape(-1, 1))[:, None, :, None]
    return mx.where(padding & mx.isfinite(y), mx.zeros_like(y), y)


SDPA = Operation(
    name="sdpa",
    reference=causal_sdpa,
    others={
        "fused": Implementation(sdpa_fused, kernels=SDPA_KERNELS, joins=True),
        "blas": Implementation(blas.sdpa_blas, on_cpu=True),
    },
    size=slice(2, 3),
    kind=lambda q, *others: str(q.shape[-1]),
    tokens={"q": 2, "gate": 1},
    rows=("q", "gate", "length"),
    proof=Proof(
        example=_example,
        workloads={
            "": lambda s, n, x: call_of_size(s, n, x, s.Dh, s.Dh, s.Hq, s.Hkv),
            "64": lambda s, n, x: call_of_size(s, n, x, 64, 64, 2 * s.Hq, s.Hq // 2),
            "128": lambda s, n, x: call_of_size(s, n, x, 128, 128, 2 * s.Hq, 2 * s.Hkv),
            "192": lambda s, n, x: call_of_size(s, n, x, 192, 128, s.heads, s.heads),
        },
        cases=_cases,
        unread=_without_padding,
        positions={"k": 2, "v": 2},
        apart=True,
        timed=is_timed,
    ),
)

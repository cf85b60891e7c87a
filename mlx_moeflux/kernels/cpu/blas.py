"""Operations on the CPU through numpy's BLAS.

MLX's own products there reach 1 to 5 GFLOP/s, numpy's 40 to 150. Quantised matrices are made dense
first, in float32. What the weights of a model look like then is kept, as long as all that is kept
takes no more than KEPT_BYTES; the rest is made anew for every call.

Each row of a call is multiplied on its own (a matrix times a vector): what it gives depends on
nothing but the row and the matrix, whichever rows are computed beside it. A BLAS promises no such
thing of matrix products, and numpy's does not keep it.

Arrays are evaluated: calls that MLX only traces are refused, and go to the references.
"""

from __future__ import annotations

import contextlib
import functools
import io
import math
import threading
import weakref
from collections.abc import Callable
from itertools import accumulate
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np

from mlx_moeflux.errors import UnsupportedError
from mlx_moeflux.kernels.linear.quantised import FLOATS, arrays_of
from mlx_moeflux.kernels.linear.weight import Weight
from mlx_moeflux.kernels.moe.expert_ffn import ExpertBank, ProjectionBank, geglu, swiglu

KEPT_BYTES = 128 << 20
# Numbers that are dequantised together, of matrices that are not kept.
BLOCK = 1 << 20
# Numbers up to which several matrices of a bank are dequantised together: they share a part of the
# work, and they are in a core's cache when they are multiplied.
SEVERAL = 1 << 17
# Numbers up to which an array is sooner copied than reshaped.
SMALL = 1 << 14


# A matrix, or one for each slot.
Stored = Weight | ProjectionBank
Key = tuple[int, int | None, int]
Reference = Callable[[], "mx.array | None"]


class Kept:
    """A cache of dense matrices, which live as long as their packed ones. A matrix enters it at its
    second use: new memory costs more than a matrix is worth to a single call.

    matrices: By the id of the packed array, the slot in it, and the id of the scales: the dense
    matrix, and references to the scales and biases that it was made of.
    """

    def __init__(self, limit: int):
        self.limit, self.nbytes = limit, 0
        self.matrices: dict[Key, tuple[np.ndarray, Reference, Reference]] = {}
        # Keys that were used, by the id of the packed array.
        self._asked: dict[int, set[Key]] = {}

    def wants(self, key: Key, packed: mx.array, nbytes: int) -> bool:
        """Return True if an absent matrix should enter: it was used before, and it fits."""
        asked = self._asked.get(key[0])
        if asked is None:
            asked = self._asked[key[0]] = set()
            weakref.finalize(packed, self.forget, key[0])
        again = key in asked
        asked.add(key)
        return again and self.nbytes + nbytes <= self.limit

    def keep(self, key: Key, values: np.ndarray, matrix: Stored) -> None:
        self._drop(key)
        self.nbytes += values.nbytes
        self.matrices[key] = values, _reference(matrix.scales), _reference(matrix.biases)

    def forget(self, owner: int) -> None:
        """Drop the dense matrices of the array with this id."""
        for key in self._asked.pop(owner, ()):
            self._drop(key)

    def _drop(self, key: Key) -> None:
        found = self.matrices.pop(key, None)
        self.nbytes -= 0 if found is None else found[0].nbytes


def _reference(array: mx.array | None) -> Reference:
    return type(None) if array is None else weakref.ref(array)


kept = Kept(KEPT_BYTES)


_TRACED = "numpy cannot compute what MLX traces; take the reference (MOEFLUX_KERNELS=reference)."


def views_of(*arrays: mx.array | None, float32: int = 0) -> list[Any]:
    """Arrays as numpy sees them, evaluated; bfloat16 as integers of 16 bits, see :func:`single`,
    and None as it is. float32: How many of the first are taken in that dtype alone.

    The one place that knows whether MLX traces. A compiled function and vmap refuse evaluation.

    Raises:
        UnsupportedError: One has another dtype, or MLX is tracing, for a compiled function or a
            gradient.
    """
    views, given = [], []
    try:
        for i, x in enumerate(arrays):
            if x is None:
                views.append(None)
                continue
            if i < float32 and x.dtype != mx.float32:
                raise UnsupportedError(
                    f"BLAS takes {mx.float32}, not {x.dtype}; take the reference."
                )
            views.append(np.asarray(x.view(mx.uint16) if x.dtype == mx.bfloat16 else x))
            given.append(x)
    except ValueError:
        raise UnsupportedError(_TRACED) from None
    # A gradient evaluates what it follows and says nothing, but the array keeps its graph. Only a
    # drawing shows that, where an operation is a rectangle: one for all arrays of a call.
    mx.export_to_dot(graph := io.StringIO(), *given)
    if "rectangle" in graph.getvalue():
        raise UnsupportedError(_TRACED)
    return views


def reshape(x: mx.array, *shape: int) -> mx.array:
    """``x.reshape(shape)``. On the CPU MLX hands every operation to another thread, and waiting for
    it takes some 80 us: what this thread's last :func:`project_blas` made is copied instead, if it
    is small."""
    for made in vars(_local).get("made", ()):
        if x is made:
            return mx.array(np.asarray(x).reshape(shape))
    return x.reshape(shape)


def rows_of(x: mx.array) -> list[mx.array]:
    """x ``[R, ...]`` -> its rows ``[1, ...]``; on the CPU copies of a small one, see
    :func:`reshape`."""
    if x.dtype == mx.float32 and x.size <= SMALL and mx.default_device() == mx.cpu:
        with contextlib.suppress(UnsupportedError):
            (values,) = views_of(x)
            return [mx.array(values[r : r + 1]) for r in range(len(x))]
    return [x[r : r + 1] for r in range(len(x))]


def product(
    rows: np.ndarray,
    matrix: Stored,
    slot: int | None = None,
    *,
    views: Views | None = None,
    keep: bool = True,
) -> np.ndarray:
    """rows ``[N, in]`` -> ``[N, out]``, each row on its own.

    slot: Which matrix of a bank. views: Its arrays, if they are known. keep: What is in the matrix
    never changes, so that its dense form may be kept.
    """
    out, known = matrix.weight.shape[-2], None
    if slot is None and matrix.weight.dtype == mx.float32:
        (known,) = views_of(matrix.weight)
    elif keep and matrix.weight.dtype != mx.float32:
        key = id(matrix.weight), slot, id(matrix.scales)
        found = kept.matrices.get(key)
        if found and found[1]() is matrix.scales and found[2]() is matrix.biases:
            known = found[0]
        if known is None and kept.wants(key, matrix.weight, 4 * out * rows.shape[1]):
            known = dense(matrix, slot, views)
            kept.keep(key, known, matrix)
    # The same blocks whether they are kept or not: the same bits.
    step = max(64, BLOCK // rows.shape[1] // 64 * 64)
    if known is None:
        views = views or Views.of(matrix)
    parts = []
    for start in range(0, out, step):
        part = slice(start, start + step)
        block = dense(matrix, slot, views, part, "block") if known is None else known[part]
        # A matrix times a vector for each row.
        parts.append(np.matmul(rows[:, None], block.T)[:, 0])
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)


class Views(NamedTuple):
    """The arrays of a matrix as numpy sees them; bfloat16 as integers of 16 bits. Floats have no
    scales and biases: their weight stands there."""

    weight: np.ndarray
    scales: np.ndarray
    biases: np.ndarray

    @classmethod
    def of(cls, matrix: Stored) -> Views:
        """
        Raises:
            UnsupportedError: The matrix is stored in another way, or MLX is tracing.
        """
        weight, spec = matrix.weight, matrix.spec
        if weight is not None:
            if spec is None and weight.dtype in FLOATS:
                return cls(*views_of(weight) * 3)
            if spec is not None and spec.mode == "affine" and matrix.biases is not None:
                return cls(*views_of(*arrays_of(matrix)))
        raise UnsupportedError(f"BLAS cannot read {spec or 'this matrix'}; take the reference.")


_local = threading.local()


def scratch(role: str | None, shape: tuple[int, ...]) -> np.ndarray:
    """Memory for float32 numbers: for a role the same for each call of this thread, else new. What
    is fresh from the system costs a fault for every page, more than is computed with it."""
    if role is None:
        return np.empty(shape, np.float32)
    known, count = vars(_local).get(role), math.prod(shape)
    if known is None or known.size < count:
        known = vars(_local)[role] = np.empty(count, np.float32)
    return known[:count].reshape(shape)


def dense(
    matrix: Stored,
    slot: int | np.ndarray | None = None,
    views: Views | None = None,
    part: slice = slice(None),
    role: str | None = None,
) -> np.ndarray:
    """A matrix, or those of one slot or several, or some of their rows, ``[..., out, in]`` in
    float32; see :func:`product`. role: Of the memory to use, see :func:`scratch`."""
    spec, (weight, scales, biases) = matrix.spec, views or Views.of(matrix)
    index = part if slot is None else (slot, part)
    weight = weight[index]
    if spec is None:
        return single(weight, role)
    scales, biases = single(scales[index])[..., None], single(biases[index])[..., None]
    if spec.bits == 8:
        eight = weight.view(np.uint8)
        values = scratch(role, eight.shape)
        values[...] = eight
    elif spec.bits in _TABLES:
        packed = weight.view(_TABLES[spec.bits][0])
        values = scratch(role, (*packed.shape[:-1], 4 * packed.shape[-1]))
        np.take(_table(spec.bits), packed, mode="clip", out=values.view(np.complex128))
    else:
        values = _unpacked(weight, spec.bits)
    grouped = values.reshape(*scales.shape[:-1], spec.group_size)
    grouped *= scales
    grouped += biases
    return values


def single(values: np.ndarray, role: str | None = None) -> np.ndarray:
    """What :func:`views_of` returns of floats, in float32; itself if it is that already."""
    if values.dtype == np.uint16:
        out = None if role is None else scratch(role, values.shape).view(np.uint32)
        return np.left_shift(values, 16, out=out, dtype=np.uint32).view(np.float32)
    return values.astype(np.float32, copy=False)


def _unpacked(packed: np.ndarray, bits: int) -> np.ndarray:
    """``[..., W]`` uint32 -> ``[..., 32 W / bits]`` float32, for numbers that cross words."""
    stream = np.unpackbits(packed.view(np.uint8), axis=-1, bitorder="little")
    stream = stream.reshape(*packed.shape[:-1], -1, bits)
    return stream.astype(np.float32) @ (2.0 ** np.arange(bits, dtype=np.float32))


# Bits -> integers that hold four numbers.
_TABLES = {2: (np.uint8, 4), 4: (np.uint16, 4)}


@functools.cache
def _table(bits: int) -> np.ndarray:
    """Integer -> its four numbers as floats, seen as one element of 16 bytes."""
    integers, count = _TABLES[bits]
    packed = np.arange(np.iinfo(integers).max + 1, dtype=np.uint16)
    values = np.empty((len(packed), count), np.float32)
    for i in range(count):
        values[:, i] = packed >> i * bits & (1 << bits) - 1
    return values.view(np.complex128)[:, 0]


# As MLX does: infinities and NaN go their way without a word.
quiet = np.errstate(all="ignore")


def rms_norm(rows: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """``[N, C]`` -> ``[N, C]``."""
    # What np.mean computes, without its checks.
    mean = np.add.reduce(rows * rows, axis=-1, keepdims=True) / np.float32(rows.shape[-1])
    return rows * (1.0 / np.sqrt(mean + np.float32(eps))) * weight


def silu(x: np.ndarray) -> np.ndarray:
    # The terms of :func:`sigmoid`.
    return x * (1.0 / (1.0 + np.exp(-x)))


def sigmoid(x: np.ndarray) -> np.ndarray:
    # exp(-x) may overflow to infinity: the result is 0 then, as it should be.
    return 1.0 / (1.0 + np.exp(-x))


def gelu(x: np.ndarray) -> np.ndarray:
    # By its approximation 0.5 (1 + tanh z) = sigmoid(2 z).
    return x * sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * (x * x * x)))


def check_experts(bank: ExpertBank) -> None:
    """Raise :class:`UnsupportedError` for biases, and for an activation that is not computed."""
    biased = any(part.bias is not None for part in (bank.gate, bank.up, bank.down))
    if biased or bank.activation not in (swiglu, geglu):
        raise UnsupportedError(
            "BLAS computes experts without biases and with silu(gate) up or gelu(gate) up; take "
            "the reference."
        )


@quiet
def project_blas(
    x, weights, *, norm=None, eps=1e-6, residual=None, normed=False, flat=False
) -> list[mx.array]:
    """:func:`~mlx_moeflux.kernels.linear.project.project` in float32. A module in the place of a
    matrix is called as it is.

    Raises:
        UnsupportedError: x is not float32, a matrix is stored in another way, or MLX is tracing.
    """
    rows, added, scale = views_of(x, residual, norm, float32=2)
    # Reshaped here: MLX hands each of its operations to another thread, and is waited for.
    rows = rows.reshape(-1, x.shape[-1])
    leading = rows.shape[:1] if flat else x.shape[:-1]
    if scale is not None:
        rows = rms_norm(rows, single(scale), eps)
    post = mx.array(rows.reshape(*leading, -1)) if norm is not None or flat else x
    results, made = [], []
    for weight in weights:
        if not isinstance(weight, Weight):
            y = weight.matmul(post)
            results.append(y if residual is None else residual + y)
            continue
        y = product(rows, weight)
        ends = list(accumulate(weight.outs)) or [y.shape[1]]
        for start, end in zip([0, *ends], ends, strict=False):
            part = y[:, start:end].reshape(*leading, end - start)
            results.append(mx.array(part if added is None else added + part))
            if part.size <= SMALL:
                made.append(results[-1])
    _local.made = made
    return [*results, post] if normed else results


@quiet
def add_shared_blas(residual, experts, gate, up, down, *, score=None) -> mx.array:
    """:func:`~mlx_moeflux.kernels.moe.add_shared.add_shared` in float32. A module in the place of
    a matrix is called as it is.

    Raises:
        UnsupportedError: See :func:`project_blas`.
    """
    arrays = residual, experts, gate, up, score
    total, routed, inner, wide, scores = views_of(*arrays, float32=5)
    inner = silu(inner) * wide
    if isinstance(down, Weight):
        shared = product(inner, down)
    else:
        shared = np.array(*views_of(down.matmul(mx.array(inner)), float32=1))
    if scores is not None:
        shared *= sigmoid(scores)
    total = total.reshape(shared.shape)
    total = total + shared if routed is None else total + routed + shared
    return mx.array(total.reshape(residual.shape))


@quiet
def expert_mix_blas(x, slots, weights, bank, *, initial=None, exchange=None) -> mx.array:
    """:func:`~mlx_moeflux.kernels.moe.expert_mix.expert_mix` in float32: slot by slot, then one sum
    in the order of k.

    Raises:
        UnsupportedError: See :func:`project_blas`.
    """
    if exchange is not None:
        raise UnsupportedError("expert_mix=blas exchanges no outputs.")
    rows, scale, before, where = views_of(x, weights, initial, slots, float32=3)
    N, K = slots.shape
    where = where.reshape(-1).astype(np.int64)
    order = np.argsort(where, kind="stable")
    order = order[: np.searchsorted(where, bank.slots, sorter=order)]
    # Absent experts contribute -0.0, which changes no bit.
    terms = np.full((N * K, rows.shape[1]), np.float32(-0.0))
    scale = scale.reshape(-1, 1)[order]
    _add_by_slot(terms, order, rows, order // K, scale, where[order], bank, max(1, len(order)))
    terms = terms.reshape(N, K, -1)
    total = terms[:, 0] if before is None else before + terms[:, 0]
    for k in range(1, K):
        total = total + terms[:, k]
    return mx.array(total)


@quiet
def add_experts(
    total: np.ndarray,
    x: mx.array,
    weights: mx.array,
    *,
    token: np.ndarray,
    rank: np.ndarray,
    slot: np.ndarray,
    bank: ExpertBank,
    at_once: int,
) -> None:
    """The terms of some (token, expert) pairs, into ``total [N, C]`` float32, with the bits of
    :func:`expert_mix_blas`.

    token, rank, slot: ``[P]``, experts one after the other in the order in which a token's are
    added; rank: The column in weights. at_once: Rows of an expert that are computed together.
    """
    rows, scale = views_of(x, weights, float32=2)
    # A token has an expert once.
    _add_by_slot(total, token, rows, token, scale[token, rank, None], slot, bank, at_once)


def _add_by_slot(
    total: np.ndarray,
    targets: np.ndarray,
    rows: np.ndarray,
    sources: np.ndarray,
    scale: np.ndarray,
    slots: np.ndarray,
    bank: ExpertBank,
    at_once: int,
) -> None:
    """``total[targets] += scale * expert(rows[sources])`` for pairs of a row and an expert,
    `at_once` of an expert together.

    rows: ``[N, C]``; scale: ``[P, 1]``; targets, sources, slots: ``[P]``, the pairs of a slot are
    neighbours and have different targets.
    """
    parts, plain = _views(bank), bank.activation is swiglu
    firsts = np.flatnonzero(np.diff(slots, prepend=-1))
    ends = [*firsts[1:].tolist(), len(slots)]
    chosen = slots[firsts]
    # Its three matrices have the same number of elements.
    several = 1 if bank.fixed else SEVERAL // (bank.gate.weight.shape[-2] * rows.shape[1])
    made: list[np.ndarray] = []
    for i, first in enumerate(firsts.tolist()):
        if several > 1 and i % several == 0:
            some, made = chosen[i : i + several], []
            for role, (part, views) in parts.items():
                made.append(dense(part, some, views, role=role))
        for start in range(first, ends[i], at_once):
            pairs = slice(start, min(start + at_once, ends[i]))
            x = rows[sources[pairs]]
            if several > 1:  # :func:`product`, which would be most of the time
                gate, up, down = made[0][i % several], made[1][i % several], made[2][i % several]
                h = np.matmul(x[:, None], gate.T)[:, 0]
                if plain:
                    h *= 1.0 / (1.0 + np.exp(-h))
                else:
                    h = gelu(h)
                h *= np.matmul(x[:, None], up.T)[:, 0]
                y = np.matmul(h[:, None], down.T)[:, 0]
            else:
                slot, keep = int(chosen[i]), bank.fixed
                gate, up, down = parts.values()
                h = product(x, gate[0], slot, views=gate[1], keep=keep)
                h = silu(h) if plain else gelu(h)
                h *= product(x, up[0], slot, views=up[1], keep=keep)
                y = product(h, down[0], slot, views=down[1], keep=keep)
            y *= scale[pairs]
            total[targets[pairs]] += y


def _views(bank: ExpertBank) -> dict[str, tuple[ProjectionBank, Views]]:
    """Gate, up and down with what numpy sees of them, found once for a bank.

    Raises:
        UnsupportedError: They are stored in another way.
    """
    known = bank.launches.get("blas")
    if known is None:
        check_experts(bank)
        parts = {"gate": bank.gate, "up": bank.up, "down": bank.down}
        known = {role: (part, Views.of(part)) for role, part in parts.items()}
        bank.launches["blas"] = known
    return known


def takes_bank(x: mx.array, slots: object, weights: object, bank: ExpertBank) -> bool:
    """Return True if numpy sees the arrays of this bank and of `x`."""
    try:
        _views(bank)
        views_of(x, float32=1)
    except UnsupportedError:
        return False
    return True


def pair_bytes(bank: ExpertBank, dtype: mx.Dtype) -> int:
    """Bytes of scratch for each pair of a token and an expert."""
    F, C = bank.gate.weight.shape[1], bank.down.weight.shape[1]
    return 4 * (3 * C + 3 * F)


@quiet
def norm_rope_blas(
    q, k, v, *, q_weight, k_weight, eps, dims, base, offset, frequencies=None, traditional=False
) -> tuple[mx.array, mx.array, mx.array]:
    """:func:`~mlx_moeflux.kernels.attention.norm_rope.norm_rope` in float32, angles in float64.

    Raises:
        UnsupportedError: q or k is not float32, or MLX is tracing.
    """
    given = None if isinstance(offset, int) else offset
    arrays = q, k, q_weight, k_weight, frequencies, given
    wide, narrow, q_weight, k_weight, turns, first = views_of(*arrays, float32=2)
    first = np.reshape(offset if first is None else first, (-1, 1, 1))  # [B or 1, 1, 1]
    turns = base ** (np.arange(0, -dims, -2) / dims) if turns is None else single(turns)
    angles = (first + np.arange(q.shape[1])[:, None]) * turns.astype(np.float64)
    angles = angles[:, :, None]  # [B or 1, T, 1, dims / 2]
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    halves = (slice(0, dims, 2), slice(1, dims, 2))
    if not traditional:
        halves = (slice(0, dims // 2), slice(dims // 2, dims))

    def normed_and_turned(x: np.ndarray, weight: np.ndarray | None) -> mx.array:
        normed = x.copy() if weight is None else rms_norm(x, single(weight), eps)
        a, b = normed[..., halves[0]], normed[..., halves[1]]
        normed[..., halves[0]], normed[..., halves[1]] = a * cos - b * sin, a * sin + b * cos
        return mx.array(normed.swapaxes(1, 2))

    wide = wide[..., : k.shape[-1]]
    turned = normed_and_turned(wide, q_weight), normed_and_turned(narrow, k_weight)
    return *turned, v.swapaxes(1, 2)


@quiet
def softmax_top_k_blas(logits, *, k, normalise=True) -> tuple[mx.array, mx.array]:
    """:func:`~mlx_moeflux.kernels.moe.router.softmax_top_k` in float32.

    Raises:
        UnsupportedError: logits are not float32, or MLX is tracing.
    """
    (values,) = views_of(logits, float32=1)
    ids = np.sort(np.argsort(-values, axis=-1, kind="stable")[:, :k], axis=-1)
    powers = np.exp(values - values.max(axis=-1, keepdims=True))
    weights = np.take_along_axis(powers, ids, axis=-1)
    weights = weights / (weights if normalise else powers).sum(axis=-1, keepdims=True)
    return mx.array(ids.astype(np.uint32)), mx.array(weights)


# Multiplications up to which OpenBLAS leaves a product of matrices to one thread.
SINGLE_THREADED = 1 << 18
# Parts with fewer keys use a core badly; more parts are better shared between threads.
LEAST_KEYS, MOST_PARTS = 32, 32


def _for_one_thread(S: int, row: int) -> list[slice]:
    """S keys in parts whose products with queries no second thread has a share in, where that
    would save little; row: Multiplications a key. On a busy machine the first thread may wait
    for the second a time slice or two: 80 ms for both products of 40 rows with 2,000 keys of 64,
    which one thread makes in 0.3 ms, and two in 0.2."""
    size = SINGLE_THREADED // row
    if not LEAST_KEYS <= size < S <= MOST_PARTS * size:
        return [slice(0, S)]
    return [slice(start, min(start + size, S)) for start in range(0, S, size)]


@quiet
def sdpa_blas(
    q, k, v, *, scale, mask, length=None, start=None, tail=None, gate=None, sinks=None
) -> mx.array:
    """:func:`~mlx_moeflux.kernels.attention.attention.causal_sdpa` in float32, the scores of one
    key head of one sequence at a time: whichever others are beside it, a sequence gets the same
    bits. Its queries share products, so prompts that are cut elsewhere agree but for rounding.

    Raises:
        UnsupportedError: q, k or v is not float32, MLX is tracing, or a mask, padding or a tail is
            given as an array, or there are sinks.
    """
    if tail is not None or any(isinstance(a, mx.array) for a in (mask, length, start, sinks)):
        raise UnsupportedError(
            "sdpa=blas takes no sinks, and no mask, start, length or tail that is an array."
        )
    queries, keys, values, gates = views_of(q, k, v, gate, float32=4)
    S = keys.shape[2] if length is None else length
    (B, Hq, T, D), Hkv, Dv = queries.shape, keys.shape[1], values.shape[3]
    G = Hq // Hkv
    hidden = np.arange(S) > S - T + np.arange(T)[:, None] if mask == "causal" else None
    parts = _for_one_thread(S, G * T * max(D, Dv))
    y = np.empty((B, T, Hkv, G, Dv), np.float32)
    for b in range(B):
        for h in range(Hkv):
            rows = queries[b, h * G : (h + 1) * G].reshape(G * T, D) * np.float32(scale)
            scores = np.empty((G * T, S), np.float32)
            for some in parts:
                scores[:, some] = rows @ keys[b, h, some].T
            if hidden is not None:
                scores.reshape(G, T, S)[:, hidden] = -np.inf
            scores -= scores.max(axis=-1, keepdims=True)
            np.exp(scores, out=scores)
            scores /= scores.sum(axis=-1, keepdims=True)
            out = scores[:, parts[0]] @ values[b, h, parts[0]]
            for some in parts[1:]:
                out += scores[:, some] @ values[b, h, some]
            y[b, :, h] = out.reshape(G, T, Dv).swapaxes(0, 1)
    y = y.reshape(B, T, Hq, Dv)
    if gates is not None:
        y *= sigmoid(gates[..., -Dv:])
    return mx.array(y).swapaxes(1, 2)

"""Operations through numpy's BLAS, for the CPU: forms of project, add_shared and expert_mix.

What a row gives depends on nothing but the row: see :mod:`mlx_moeflux.kernels.blas`. Attention over
prompts is the exception.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, repeat

import mlx.core as mx
import numpy as np

from mlx_moeflux.errors import UnsupportedError
from mlx_moeflux.kernels import blas
from mlx_moeflux.kernels.expert_ffn import ExpertBank, ProjectionBank
from mlx_moeflux.kernels.project import Weight


@blas.quiet
def project_blas(
    x: mx.array,
    weights: Sequence[Weight],
    *,
    norm: mx.array | None = None,
    eps: float = 1e-6,
    residual: mx.array | None = None,
    normed: bool = False,
    flat: bool = False,
) -> list[mx.array]:
    """:func:`~mlx_moeflux.kernels.project.project` in float32. A module in the place of a matrix
    is called as it is.

    Raises:
        UnsupportedError: x is not float32, a matrix is stored in another way, or MLX is tracing.
    """
    rows = blas.rows_of(x)
    _check(*(w for w in weights if isinstance(w, Weight)))
    leading = rows.shape[:1] if flat else x.shape[:-1]
    # Reshaped here: MLX hands each of its operations to another thread, and is waited for.
    added = None if residual is None else blas.numbers(residual)
    if norm is not None:
        rows = blas.rms_norm(rows, blas.floats(norm), eps)
    post = mx.array(rows.reshape(*leading, -1)) if norm is not None or flat else x
    results, made = [], []
    for weight in weights:
        if not isinstance(weight, Weight):
            y = weight.matmul(post)
            results.append(y if residual is None else residual + y)
            continue
        y = blas.product(rows, weight)
        ends = list(accumulate(weight.results))
        for start, end in zip([0, *ends], ends, strict=False):
            part = y[:, start:end].reshape(*leading, end - start)
            made.append(mx.array(part if added is None else added + part))
            results.append(made[-1])
    blas.remember(made)
    return [*results, post] if normed else results


@blas.quiet
def add_shared_blas(
    residual: mx.array,
    experts: mx.array | None,
    gate: mx.array,
    up: mx.array,
    down: Weight,
    *,
    score: mx.array | None = None,
) -> mx.array:
    """:func:`~mlx_moeflux.kernels.add_shared.add_shared` in float32.

    Raises:
        UnsupportedError: See :func:`project_blas`.
    """
    _check(down)
    inner = blas.silu(blas.numbers(gate)) * blas.numbers(up)
    shared = blas.product(inner, down)
    if score is not None:
        shared *= blas.sigmoid(blas.numbers(score))
    total = blas.rows_of(residual)
    total = total + shared if experts is None else total + blas.numbers(experts) + shared
    return mx.array(total.reshape(residual.shape))


@blas.quiet
def expert_mix_blas(
    x: mx.array,
    slots: mx.array,
    weights: mx.array,
    bank: ExpertBank,
    *,
    initial: mx.array | None = None,
) -> mx.array:
    """:func:`~mlx_moeflux.kernels.expert_mix.expert_mix` in float32: slot by slot, then one sum
    in the order of k.

    Raises:
        UnsupportedError: See :func:`project_blas`.
    """
    rows = blas.rows_of(x)
    N, K = slots.shape
    where = blas.values_of(slots).reshape(-1).astype(np.int64)
    order = np.argsort(where, kind="stable")
    order = order[: np.searchsorted(where, bank.slots, sorter=order)]
    # Absent experts contribute -0.0, which changes no bit.
    terms = np.full((N * K, rows.shape[1]), np.float32(-0.0))
    for pairs, expert in _by_slot(where, order, rows.shape[1], bank):
        terms[pairs] = expert(rows[pairs // K])
    scale = blas.numbers(weights).reshape(-1)
    terms[order] *= scale[order, None]
    terms = terms.reshape(N, K, -1)
    total = terms[:, 0] if initial is None else blas.numbers(initial) + terms[:, 0]
    for k in range(1, K):
        total = total + terms[:, k]
    return mx.array(total)


@blas.quiet
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
    rows, scale = blas.rows_of(x), blas.numbers(weights)[token, rank]
    for pairs, expert in _by_slot(slot, np.arange(len(slot)), rows.shape[1], bank):
        for start in range(0, len(pairs), at_once):
            some = pairs[start : start + at_once]
            # A token has an expert once.
            total[token[some]] += expert(rows[token[some]]) * scale[some, None]


def _by_slot(
    slots: np.ndarray, order: np.ndarray, width: int, bank: ExpertBank
) -> Iterator[tuple[np.ndarray, Callable[[np.ndarray], np.ndarray]]]:
    """Places in `slots`, in the given order, in which a slot's are neighbours: those of each
    slot, and its expert, rows ``[n, C]`` -> ``[n, C]``; width: C."""
    _check(bank.gate, bank.up, bank.down)
    parts = _views(bank)
    firsts = np.flatnonzero(np.diff(slots[order], prepend=-1))
    chosen = slots[order[firsts]].tolist()
    widths = (width, width, bank.gate.weight.shape[-2])
    made = [
        repeat(None) if bank.fixed else blas.dense_each(part, chosen, n, views, role)
        for (part, views), n, role in zip(parts, widths, ("gate", "up", "down"), strict=True)
    ]
    for slot, pairs, *known in zip(chosen, np.split(order, firsts[1:]), *made, strict=False):

        def product(rows: np.ndarray, i: int, slot: int = slot, known: list = known) -> np.ndarray:
            part, views = parts[i]
            return blas.product(rows, part, slot, views=views, keep=bank.fixed, known=known[i])

        def expert(rows: np.ndarray, product: Callable = product) -> np.ndarray:
            h = blas.silu(product(rows, 0))
            h *= product(rows, 1)
            return product(h, 2)

        yield pairs, expert


def _views(bank: ExpertBank) -> list[tuple[ProjectionBank, blas.Views]]:
    """Gate, up and down with what numpy sees of them, found once for a bank."""
    known = bank.launches.get("blas")
    if known is None:
        known = [(part, blas.Views.of(part)) for part in (bank.gate, bank.up, bank.down)]
        bank.launches["blas"] = known
    return known


def _takes_bank(x: mx.array, slots: object, weights: object, bank: ExpertBank) -> bool:
    if not all(blas.readable(part) for part in (bank.gate, bank.up, bank.down)):
        return False
    try:
        blas.numbers(x)
        _views(bank)
    except UnsupportedError:
        return False
    return True


def _pair_bytes(bank: ExpertBank, dtype: mx.Dtype) -> int:
    F, C = bank.gate.weight.shape[1], bank.down.weight.shape[1]
    return 4 * (3 * C + 3 * F)


expert_mix_blas.takes, expert_mix_blas.adds = _takes_bank, add_experts
expert_mix_blas.pair_bytes = _pair_bytes


def _check(*matrices: object) -> None:
    for matrix in matrices:
        if not blas.readable(matrix):
            raise UnsupportedError(
                f"BLAS cannot read {getattr(matrix, 'spec', None) or 'this matrix'}; take the "
                "reference."
            )


@blas.quiet
def norm_rope_blas(
    q: mx.array,
    k: mx.array,
    v: mx.array | None,
    *,
    q_weight: mx.array | None,
    k_weight: mx.array | None,
    eps: float,
    dims: int,
    base: float,
    offset: int | mx.array,
    frequencies: mx.array | None = None,
    traditional: bool = False,
) -> tuple[mx.array, mx.array, mx.array | None]:
    """:func:`~mlx_moeflux.kernels.norm_rope.norm_rope` in float32, angles in float64.

    Raises:
        UnsupportedError: q or k is not float32, or MLX is tracing.
    """
    first = np.array(offset) if isinstance(offset, int) else blas.values_of(offset)
    first = first.reshape(-1, 1, 1)  # [B or 1, 1, 1]
    if frequencies is None:
        turns = base ** (np.arange(0, -dims, -2) / dims)
    else:
        turns = blas.floats(frequencies)
    angles = (first + np.arange(q.shape[1])[:, None]) * turns.astype(np.float64)
    angles = angles[:, :, None]  # [B or 1, T, 1, dims / 2]
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    halves = (slice(0, dims, 2), slice(1, dims, 2))
    if not traditional:
        halves = (slice(0, dims // 2), slice(dims // 2, dims))

    def normed_and_turned(x: np.ndarray, weight: mx.array | None) -> mx.array:
        normed = x.copy() if weight is None else blas.rms_norm(x, blas.floats(weight), eps)
        a, b = (normed[..., half] for half in halves)
        normed[..., halves[0]], normed[..., halves[1]] = a * cos - b * sin, a * sin + b * cos
        return mx.array(normed.swapaxes(1, 2))

    wide, narrow = blas.numbers(q)[..., : k.shape[-1]], blas.numbers(k)
    turned = normed_and_turned(wide, q_weight), normed_and_turned(narrow, k_weight)
    return *turned, None if v is None else v.swapaxes(1, 2)


@blas.quiet
def softmax_top_k_blas(
    logits: mx.array, *, k: int, normalise: bool = True
) -> tuple[mx.array, mx.array]:
    """:func:`~mlx_moeflux.kernels.router.softmax_top_k` in float32.

    Raises:
        UnsupportedError: logits are not float32, or MLX is tracing.
    """
    values = blas.numbers(logits)
    ids = np.sort(np.argsort(-values, axis=-1, kind="stable")[:, :k], axis=-1)
    powers = np.exp(values - values.max(axis=-1, keepdims=True))
    weights = np.take_along_axis(powers, ids, axis=-1)
    weights = weights / (weights if normalise else powers).sum(axis=-1, keepdims=True)
    return mx.array(ids.astype(np.uint32)), mx.array(weights)


# Multiplications up to which OpenBLAS leaves a product of matrices to one thread.
SINGLE_THREADED = 1 << 18
# Fewer keys at once use a core badly; more parts are better shared between threads.
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


@blas.quiet
def sdpa_blas(
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
) -> mx.array:
    """:func:`~mlx_moeflux.kernels.attention.causal_sdpa` in float32, the scores of one key head
    of one sequence at a time: whichever others are beside it, a sequence gets the same bits. Its
    queries share products, so prompts that are cut elsewhere agree but for rounding.

    Raises:
        UnsupportedError: q, k or v is not float32, MLX is tracing, or a mask, padding or a tail is
            given as an array.
    """
    if tail is not None or any(isinstance(a, mx.array) for a in (mask, length, start)):
        raise UnsupportedError("sdpa=blas takes no mask, start, length or tail that is an array.")
    queries, keys, values = blas.numbers(q), blas.numbers(k), blas.numbers(v)
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
    if gate is not None:
        y *= blas.sigmoid(blas.numbers(gate)[..., -Dv:])
    return mx.array(y).swapaxes(1, 2)

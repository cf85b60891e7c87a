"""Multi-head latent attention. Its cache has one latent and one rotary key per position.

``latent_prepare`` splits and rotates what the projections give, ``head_product`` applies the
matrices of each head, and ``latent_attention`` or ``latent_prefill`` attends.

Head h has keys ``k_s = [W_K(h) c_s, r_s]`` and values ``v_s = W_V(h) c_s`` of the latent c_s and
the rotary key r_s of position s, which all heads share. Two forms of the same sum:

    absorbed      score = (W_K(h)^T q_nope) c_s + q_rotary r_s,  y = W_V(h) (sum p_s c_s)
    materialised  score = q_nope (W_K(h) c_s) + q_rotary r_s,    y = sum p_s (W_V(h) c_s)

Neither holds the scores of all heads, queries and keys: it takes some keys at a time with a running
softmax in float32.

Evaluates: every part of keys and heads, unless one part takes all.

Shapes:
    latents: ``[B, 1, capacity, R]``; rotary_keys: ``[B, 1, capacity, Dr]``: whole buffers, of
    which the first `length` rows count and no other is read. The T queries are the last of them:
    query t sees keys up to length - T + t.
    mask: None (every query sees every key), "causal", or bool ``[B or 1, 1, T, length]``.
    length: An int, or (one query only) int32 ``[1]`` or ``[B]``.
    start: None, or int32 ``[B]``: the first key of each sequence; a query before it sees itself
    alone, and its result is undefined.
    tail: None, or (one query only) the newest rows of both buffers, as in
    :mod:`mlx_moeflux.kernels.attention.attention`.
    values: None, or of the absorbed form each head's matrix ``[Dv, R]``, which the weighted latents
    go through.

On a GPU every head reads the same latents: a threadgroup owns 16 or more rows (heads x tokens) and
a part of the keys. :func:`attend_values` joins the parts, and puts each head's result through its
matrix.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from mlx_moeflux.checkpoint.quantization import QuantSpec
from mlx_moeflux.errors import ShapeError, UnsupportedError
from mlx_moeflux.kernels import examples
from mlx_moeflux.kernels.attention.attention import (
    SDPA_KERNELS,
    SHARED,
    Call,
    check_dtypes,
    check_tail,
    joined,
    plan_of,
    run,
)
from mlx_moeflux.kernels.attention.norm_rope import for_each_sequence, offsets
from mlx_moeflux.kernels.examples import Arguments, Normal, Sizes
from mlx_moeflux.kernels.linear.dequantise import dequantise, made_dense
from mlx_moeflux.kernels.linear.matvec import simdgroups_of, tiling
from mlx_moeflux.kernels.linear.quantised import FLOATS, Matrix, arrays_of, matrix_of
from mlx_moeflux.kernels.linear.weight import Weight
from mlx_moeflux.kernels.mla import latent_token
from mlx_moeflux.kernels.operation import Implementation, Operation
from mlx_moeflux.kernels.proof import Proof
from mlx_moeflux.kernels.runtime.launch_args import filled
from mlx_moeflux.kernels.runtime.launcher import (
    MetalKernel,
    backend,
    most_threads,
    on_nvidia,
)

Parts = tuple[mx.array | None, mx.array, mx.array, mx.array]


def latent_prepare(
    q: mx.array,
    kv: mx.array,
    *,
    norm: mx.array,
    eps: float,
    frequencies: mx.array,
    offset: int | mx.array,
    factor: float = 1.0,
    interleaved: bool = False,
    nope: bool = True,
) -> Parts:
    """Split, norm and rotate the results of latent attention's projections, in stock MLX.

        nope, rotary = q[..., :Dn], turn(q[..., Dn:])      of each head
        latent, key = norm(kv[..., :R]), turn(kv[..., R:])  that all heads share

    Pair i of position p turns by p * frequencies[i] and is scaled by `factor`.

    Shapes:
        q: ``[B, T, H, Dn + Dr]``; kv: ``[B, T, R + Dr]``; norm: ``[R]``; frequencies:
        ``[Dr / 2]`` float32.
        offset: position of the first token, an int or int32 ``[B]``.
        returns: nope ``[B, H, T, Dn]`` (None without `nope`), rotary ``[B, H, T, Dr]``, latent
        ``[B, 1, T, R]``, key ``[B, 1, T, Dr]`` in the dtype of q.
    """
    R, dims = norm.shape[0], 2 * frequencies.shape[0]
    if not isinstance(offset, int):
        offset = for_each_sequence(offset, q.shape[0])
    first, rotary = mx.split(q.swapaxes(1, 2), [q.shape[-1] - dims], axis=-1)
    latent, key = mx.split(kv[:, None], [R], axis=-1)

    def turned(x: mx.array) -> mx.array:
        dtype = x.dtype
        x = mx.fast.rope(
            x if factor == 1.0 else x * factor,
            dims,
            traditional=interleaved,
            base=None,
            scale=1.0,
            offset=offset,
            freqs=1.0 / frequencies,
        )
        return x.astype(dtype)

    parts = turned(rotary), mx.fast.rms_norm(latent, norm, eps), turned(key)
    return (first if nope else None, *parts)


def _prepare_kernel(name: str, outputs: tuple[str, ...]) -> MetalKernel:
    whole = "nope" in outputs
    return MetalKernel(
        name,
        file="per_head_matmul.metal",
        inputs=("q", "kv", "weight", "frequencies", "numbers", "offset"),
        outputs=outputs,
        body=f"""
            latent_prepare<T, W, HEADS, DN, DR, RANK, INTERLEAVED, {str(whole).lower()}, EACH>(
                q, kv, weight, frequencies, numbers, offset, {"nope" if whole else "nullptr"},
                rotary, latents, keys, q_shape[0], q_shape[1], thread_position_in_grid.x / 32,
                thread_index_in_simdgroup);
        """,
    )


_PREPARED = ("nope", "rotary", "latents", "keys")
_WHOLE = _prepare_kernel("latent_prepare", _PREPARED)
_TURNED = _prepare_kernel("latent_turn", _PREPARED[1:])
# Of a threadgroup, and heads that a simdgroup turns by the same sines.
_PREPARE_THREADS, _EACH = 128, 8


def latent_prepare_fused(
    q, kv, *, norm, eps, frequencies, offset, factor=1.0, interleaved=False, nope=True
):
    """:func:`latent_prepare` in one launch; everything between is float32.

    Raises:
        ShapeError: Shapes or dtypes do not fit together, or Dn or Dr is no multiple of 4.
        UnsupportedError: MLX drives no GPU.
    """
    launch = _prepare_launch(q.shape, kv.shape, norm.shape, frequencies.shape[0], interleaved)
    if q.dtype not in FLOATS or kv.dtype != q.dtype or norm.dtype not in FLOATS:
        raise ShapeError(f"latent_prepare: q is {q.dtype}, kv {kv.dtype} and norm {norm.dtype}.")
    template = {"T": q.dtype, "W": norm.dtype, **launch["template"]}
    shapes = launch["output_shapes"][0 if nope else 1 :]
    options = {
        "template": template,
        "output_shapes": shapes,
        "output_dtypes": [q.dtype] * len(shapes),
    }
    outputs = (_WHOLE if nope else _TURNED)(
        q, kv, norm, frequencies.astype(mx.float32), filled(eps, factor),
        offsets(offset, q.shape[0]), **launch | options,
    )  # fmt: skip
    return tuple(outputs) if nope else (None, *outputs)


@functools.lru_cache(maxsize=1024)
def _prepare_launch(q, kv, norm, pairs, interleaved) -> dict[str, Any]:
    """Shapes -> launch, checked once for each."""
    (B, T, H, D), Dr = q, 2 * pairs
    R = kv[-1] - Dr
    if len(kv) != 3 or kv[:2] != (B, T) or norm != (R,) or Dr >= D or (D - Dr) % 4 or Dr % 4:
        raise ShapeError(
            f"latent_prepare: q {q}, kv {kv}, norm {norm} and {pairs} pairs do not fit together; "
            "both parts of a head are multiples of 4."
        )
    simdgroups = B * T * (-(-H // _EACH) + 1)
    return {
        "template": {
            "HEADS": H,
            "DN": D - Dr,
            "DR": Dr,
            "RANK": R,
            "INTERLEAVED": interleaved,
            "EACH": _EACH,
        },
        "grid": (-(-simdgroups * 32 // _PREPARE_THREADS) * _PREPARE_THREADS, 1, 1),
        "threadgroup": (_PREPARE_THREADS, 1, 1),
        "output_shapes": [(B, H, T, D - Dr), (B, H, T, Dr), (B, 1, T, R), (B, 1, T, Dr)],
    }


@dataclass(frozen=True)
class HeadMatrices:
    """Rows first .. first + count - 1 of each head's block of a matrix ``[H, block, in]``.

    heads: Of them, those from `heads[0]` to `heads[1]` - 1; None: all.
    """

    weight: mx.array
    scales: mx.array | None
    biases: mx.array | None
    spec: QuantSpec | None
    first: int
    count: int
    heads: tuple[int, int] | None = None

    @functools.cached_property
    def number(self) -> int:
        """Number of heads."""
        first, last = self.heads or (0, self.weight.shape[0])
        return last - first

    @functools.cached_property
    def width(self) -> int:
        """Inputs of each matrix."""
        words = self.weight.shape[-1]
        return words if self.spec is None else words * 32 // self.spec.bits

    def parts(self) -> list[mx.array | None]:
        """weight, scales and biases of these heads and rows, as views."""
        rows, arrays = slice(self.first, self.first + self.count), []
        for array in (self.weight, self.scales, self.biases):
            if array is not None and self.count < self.weight.shape[1]:
                array = array[:, rows]
            if array is not None and self.heads is not None:
                array = array[slice(*self.heads)]
            arrays.append(array)
        return arrays

    def dense(self, dtype: mx.Dtype, make: Callable = made_dense) -> mx.array:
        """``[H, out, in]`` in `dtype`; make: :func:`dequantise` or another that does the same."""
        weight, scales, biases = self.parts()
        assert weight is not None
        return make(Weight(weight, scales, biases, self.spec), dtype)


def head_product(x: mx.array, matrices: HeadMatrices, *, transposed: bool = False) -> mx.array:
    """Products of rows with one matrix for each head, in stock MLX.

        y[b, h, t] = w_h x[b, h, t]        (transposed: w_h^T x[b, h, t])

    Matrices are taken as they are stored; not on NVIDIA, where MLX 0.32.4 gives wrong products of
    several sequences with quantised matrices of several heads, and refuses some shapes.

    Shapes:
        x: ``[B, H, T, in]``, or ``[B, 1, T, in]`` where all heads have the same rows; matrices:
        ``[out, in]`` of each head, quantised or not.
        returns: ``[B, H, T, out]`` in the dtype of x; `transposed`: out and in swapped.
    """
    _check_product(x, matrices, transposed)
    spec = matrices.spec
    if spec is None or (mx.default_device().type == mx.gpu and on_nvidia()):
        return _dense_product(x, matrices.dense(x.dtype, dequantise), transposed)
    weight, scales, biases = matrices.parts()
    assert weight is not None
    assert scales is not None
    return mx.quantized_matmul(
        x, weight, scales, biases, not transposed, spec.group_size, spec.bits, spec.mode
    )


def head_product_dequantised(x, matrices, *, transposed=False):
    """:func:`head_product` with matrices made dense first, in the dtype of x."""
    _check_product(x, matrices, transposed)
    return _dense_product(x, matrices.dense(x.dtype), transposed)


def _dense_product(x: mx.array, weight: mx.array, transposed: bool) -> mx.array:
    return x @ (weight if transposed else weight.swapaxes(-1, -2))


_MATVEC = MetalKernel(
    "head_matvec",
    file="matvec.metal",
    inputs=("x", "w", "scales", "biases"),
    outputs=("y",),
    body="""
        threadgroup float memory[MEMORY];
        const uint row = threadgroup_position_in_grid.y;
        const uint block = row / uint(x_shape[2]) % HEADS * BLOCK;
        norm_matvec<1, ROWS, SIMDGROUPS, IN, FIRST, OUT, BITS, GROUP, V, SPLIT, EXACT, PLAIN,
                    false>(
            x, x, 0.0f, x, w + ulong(block) * PACKS, scales + ulong(block) * (IN / GROUP),
            biases + ulong(block) * (IN / GROUP), y, memory, OUT, row,
            threadgroup_position_in_grid.x, simdgroup_index_in_threadgroup,
            thread_index_in_simdgroup);
    """,
)
_NARROW = MetalKernel(
    "head_narrow",
    file="per_head_matmul.metal",
    inputs=("x", "w", "scales", "biases"),
    outputs=("y",),
    body="""
        const uint row = threadgroup_position_in_grid.y;
        const uint block = row / uint(x_shape[2]) % HEADS * BLOCK;
        narrow_matvec<ROWS, SIMDGROUPS, IN, FIRST, OUT, BITS, GROUP, V, EXACT>(
            x + ulong(row) * IN, w + ulong(block) * PACKS, scales + ulong(block) * (IN / GROUP),
            biases + ulong(block) * (IN / GROUP), y + ulong(row) * OUT,
            threadgroup_position_in_grid.x, simdgroup_index_in_threadgroup,
            thread_index_in_simdgroup);
    """,
)
_VECMAT = MetalKernel(
    "head_vecmat",
    file="per_head_matmul.metal",
    inputs=("x", "w", "scales", "biases"),
    outputs=("y",),
    body="""
        threadgroup float sums[SUMS];
        head_vecmat<HEADS, IN, OUT, FIRST, BLOCK, BITS, GROUP, V, SIMDGROUPS>(
            x, w, scales, biases, y, sums, x_shape[2], threadgroup_position_in_grid.y,
            threadgroup_position_in_grid.x, simdgroup_index_in_threadgroup,
            thread_index_in_simdgroup);
    """,
)
# CUDA allows 65535 threadgroups in the second direction.
_MOST_ROWS = 32768
_WIDE = 8  # simdgroups of a threadgroup of head_vecmat
# Of one for narrow rows, and how often each takes rows.
NARROW_SIMDGROUPS, MOST_NARROW = 4, 4


def head_product_fused(x, matrices, *, transposed=False):
    """:func:`head_product` in one launch, for a few rows of each head. Rows that heads share, and
    some heads only, go to :func:`head_product_dequantised`.

    Raises:
        ShapeError: Shapes or dtypes do not fit together, or there are too many rows.
        UnsupportedError: The matrices are stored in another way, or there is no GPU.
    """
    _check_product(x, matrices, transposed)
    B, H, T, _ = x.shape
    if matrices.heads is not None or matrices.number != H:
        return head_product_dequantised(x, matrices, transposed=transposed)
    if not 0 < B * H * T <= _MOST_ROWS or x.dtype not in FLOATS:
        raise ShapeError(
            f"head_product: x is {x.dtype} {list(x.shape)}; expected {_MOST_ROWS} rows at most."
        )
    layout = matrix_of(matrices, matrices.width)
    launch = _product_launch(
        x.shape, matrices.weight.shape, layout, matrices.first, matrices.count, x.dtype, transposed,
        most_threads(),
    )  # fmt: skip
    kernel, launch = launch
    return kernel(x, *arrays_of(matrices), **launch)[0]


@functools.lru_cache(maxsize=256)
def _product_launch(
    x: tuple[int, ...],
    weight: tuple[int, ...],
    layout: Matrix,
    first: int,
    count: int,
    dtype: mx.Dtype,
    transposed: bool,
    threads: int,
) -> tuple[MetalKernel, dict[str, Any]]:
    B, H, T, width = x
    kernel, narrow = _MATVEC, narrow_rows(layout, count, width)
    template = {"HEADS": H, "IN": width, "FIRST": first, "BLOCK": weight[1]}
    if transposed:
        kernel = _VECMAT
        columns = weight[2] * 32 // layout.bits if layout.bits else weight[2]
        words = 1 if layout.bits else 4
        numbers = words * (32 // layout.bits) if layout.bits else words
        groups, simdgroups = -(-columns // (32 * numbers)), _WIDE
        template |= {"OUT": columns, "BITS": layout.bits, "GROUP": layout.group, "V": words}
        template |= {"SUMS": simdgroups * numbers * 32}
    elif narrow:
        kernel, columns, simdgroups = _NARROW, count, NARROW_SIMDGROUPS
        groups = -(-count // (simdgroups * narrow["ROWS"]))
        template |= {"OUT": count, "PACKS": weight[2], "BITS": layout.bits, "GROUP": layout.group}
        template |= {"EXACT": dtype == mx.float32, **narrow}
    else:
        groups, tile, memory = tiling(layout, count, width, dtype, threads)
        columns, simdgroups = count, simdgroups_of(width, threads)
        template |= {"OUT": count, "PACKS": weight[2], "MEMORY": memory, **tile}
        template |= {"EXACT": dtype == mx.float32}
    return kernel, {
        "template": template | {"SIMDGROUPS": simdgroups},
        "grid": (groups * simdgroups * 32, B * H * T, 1),
        "threadgroup": (32 * simdgroups, 1, 1),
        "output_shapes": [(B, H, T, columns)],
        "output_dtypes": [dtype],
    }


def narrow_rows(layout: Matrix, count: int, width: int) -> dict[str, int] | None:
    """Return the layout of a matrix ``[count, width]`` of which a simdgroup computes several rows
    together: words of a lane and rows of a simdgroup; None if rows are wider or uneven."""
    words = min(4, layout.group * layout.bits // 32) if layout.bits else 8
    while words > (0 if layout.bits else 2):
        lanes, rest = divmod(width, words * (32 // layout.bits if layout.bits else 1))
        rows = math.gcd(count, MOST_NARROW * 32 // max(lanes, 1))
        if not rest and 0 < lanes <= 16 and not lanes & (lanes - 1) and rows * lanes % 32 == 0:
            return {"V": words, "ROWS": rows}
        words //= 2
    return None


def _check_product(x: mx.array, matrices: HeadMatrices, transposed: bool) -> None:
    width = matrices.count if transposed else matrices.width
    if x.ndim != 4 or x.shape[1] not in (1, matrices.number) or x.shape[3] != width:
        raise ShapeError(
            f"head_product: x is {list(x.shape)}, expected [B, {matrices.number} or 1, T, {width}]."
        )


# Scores computed together: 16 MiB in float32, and as much again for each step to the weights.
SCORES_AT_ONCE = 4 << 20
KEYS_AT_ONCE = 512
# Stands for minus infinity, of which the difference to itself is no number.
_NEVER = -1e30

Mask = mx.array | str | None


def latent_attention(
    q_latent: mx.array,
    q_rotary: mx.array,
    latents: mx.array,
    rotary_keys: mx.array,
    *,
    length: int | mx.array,
    scale: float,
    mask: Mask,
    start: mx.array | None = None,
    tail: tuple[mx.array, mx.array] | None = None,
    values: HeadMatrices | None = None,
) -> mx.array:
    """The absorbed form.

    q_latent ``[B, H, T, R]`` (W_K^T q_nope), q_rotary ``[B, H, T, Dr]`` -> ``[B, H, T, R]``, the
    weighted latents, in the dtype of q_latent; with `values` ``[B, H, T, Dv]``.
    """
    B, H, T, R = q_latent.shape
    if tail is not None:
        whole = (latents, rotary_keys)
        latents, rotary_keys = (joined(x, t, length) for x, t in zip(whole, tail, strict=True))
    if isinstance(length, mx.array):
        # In a traced step: nothing is evaluated, and the scores of one query are few.
        key, length = mx.arange(latents.shape[2]), length.reshape(-1, 1, 1, 1)
        visible = key < length
        if start is not None:
            visible = (visible & (key >= start[:, None, None, None])) | (key == length - 1)
        q = mx.concatenate([q_latent, q_rotary], axis=-1).astype(mx.float32) * scale
        keys = mx.concatenate([latents, rotary_keys], axis=-1).astype(mx.float32)
        scores = mx.where(visible, q @ keys.swapaxes(-1, -2), _NEVER)
        y = (mx.softmax(scores, axis=-1) @ keys[..., :R]).astype(q_latent.dtype)
        return y if values is None else head_product(y, values)
    heads = _at_once(H, B * T * min(length, KEYS_AT_ONCE))
    q = mx.concatenate([q_latent, q_rotary], axis=-1).astype(mx.float32) * scale
    parts = []
    for first in range(0, H, heads):
        # All heads read the same keys: one product of h T rows.
        h = min(heads, H - first)
        rows = q[:, first : first + h].reshape(B, 1, h * T, -1)
        sums = None
        for begin, end in _blocks(length, B * max(h * T, rows.shape[-1])):
            c, r = latents[:, :, begin:end], rotary_keys[:, :, begin:end]
            keys = mx.concatenate([c, r], axis=-1).astype(mx.float32)
            scores = (rows @ keys.swapaxes(-1, -2)).reshape(B, h, T, -1)
            scores = _masked(scores, mask, begin, length, start).reshape(B, 1, h * T, -1)
            sums = _softmax_sums(scores, keys[..., :R], sums)
        assert sums is not None, "there is a first block"
        _, weight, total = sums
        parts.append((total / weight).reshape(B, h, T, R).astype(q_latent.dtype))
        if heads < H:
            mx.eval(parts[-1])
    y = parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=1)
    return y if values is None else head_product(y, values)


def latent_prefill(
    q: mx.array,
    q_rotary: mx.array,
    latents: mx.array,
    rotary_keys: mx.array,
    *,
    expand: Callable[[mx.array, int, int], tuple[mx.array, mx.array]],
    length: int,
    scale: float,
    mask: Mask,
    start: mx.array | None = None,
) -> mx.array:
    """The materialised form: less work when many queries share the keys.

    q ``[B, T, H, Dn + Dr]``, of which each head's first Dn count, q_rotary ``[B, H, T, Dr]`` ->
    ``[B, H, T, Dv]`` in the dtype of q. expand: (latents ``[B, 1, s, R]``, first head, last head
    + 1) -> keys ``[B, h, s, Dn]`` and values ``[B, h, s, Dv]`` of those heads.
    """
    B, T, H, D = q.shape
    q_nope = q[..., : D - q_rotary.shape[3]].swapaxes(1, 2)
    heads = _at_once(H, B * T * min(length, KEYS_AT_ONCE))
    parts = []
    for first in range(0, H, heads):
        last = min(first + heads, H)
        q_n, q_r = (q[:, first:last].astype(mx.float32) * scale for q in (q_nope, q_rotary))
        sums = None
        for begin, end in _blocks(length, B * (last - first) * T):
            c, r = latents[:, :, begin:end], rotary_keys[:, :, begin:end]
            k, v = expand(c, first, last)
            scores = q_n @ k.astype(mx.float32).swapaxes(-1, -2)
            scores = scores + q_r @ r.astype(mx.float32).swapaxes(-1, -2)
            scores = _masked(scores, mask, begin, length, start)
            sums = _softmax_sums(scores, v.astype(mx.float32), sums)
        assert sums is not None, "there is a first block"
        _, weight, total = sums
        parts.append((total / weight).astype(q_nope.dtype))
        if heads < H:
            mx.eval(parts[-1])
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=1)


def _softmax_sums(scores: mx.array, values: mx.array, before: Any) -> tuple[mx.array, ...]:
    """scores ``[..., T, s]``, values ``[..., s, D]`` float32 -> the highest score, sum exp(score)
    and sum exp(score) value, both less the highest; before: None, or the same of the keys before.
    """
    high = scores.max(axis=-1, keepdims=True)
    if before is None:
        p = mx.exp(scores - high)
        return high, p.sum(axis=-1, keepdims=True), p @ values
    highest, weight, total = before
    # Else MLX begins the blocks together and holds the scores of several.
    mx.eval(total, weight)
    high = mx.maximum(high, highest)
    p, fade = mx.exp(scores - high), mx.exp(highest - high)
    return high, weight * fade + p.sum(axis=-1, keepdims=True), total * fade + p @ values


def _at_once(count: int, cost: int) -> int:
    """Return how many of `count` heads with `cost` scores each stay within bounds."""
    return max(1, min(count, SCORES_AT_ONCE // cost))


def _blocks(length: int, rows: int) -> list[tuple[int, int]]:
    """Stretches of keys for so many rows of scores."""
    step = max(KEYS_AT_ONCE, SCORES_AT_ONCE // rows // KEYS_AT_ONCE * KEYS_AT_ONCE)
    if rows * KEYS_AT_ONCE > SCORES_AT_ONCE:
        step = max(1, SCORES_AT_ONCE // rows)
    starts = range(0, length, step)
    return list(zip(starts, [*starts[1:], length], strict=True))


def _masked(
    scores: mx.array, mask: Mask, begin: int, length: int, start: mx.array | None
) -> mx.array:
    """scores ``[B, h, T, s]`` of the keys from `begin` on, those hidden at `_NEVER`."""
    T, s = scores.shape[-2:]
    key, query = mx.arange(begin, begin + s), mx.arange(length - T, length)[:, None]
    visible = None
    if isinstance(mask, mx.array):
        visible = mask[..., begin : begin + s]
    elif mask is not None and begin + s > length - T + 1:
        visible = key <= query
    if start is not None:
        real = key >= start[:, None, None, None]
        visible = (real if visible is None else visible & real) | (key == query)
    return scores if visible is None else mx.where(visible, scores, _NEVER)


# SIMDGROUPS: or half as many, where there may not be so many threads. MOST_STEPS: a lane holds so
# many parts of rows. MOST_COLUMNS: threadgroup memory holds ten floats for each.
SIMDGROUPS, MOST_STEPS, MOST_COLUMNS = 16, 8, 512

VALUES_KERNEL = MetalKernel(
    "attend_values",
    file="latent_values.metal",
    inputs=("partial", "stats", "w", "scales", "biases"),
    outputs=("y",),
    body="""
        threadgroup float shared[8 * (DV + 1)];
        threadgroup float values[2 * DV];
        attend_values<ROWS, SIMDGROUPS, HEADS, DV, OUT, FIRST, BLOCK, PACKS, BITS, GROUP, V, EXACT>(
            partial, stats, w, scales, biases, y, shared, values, partial_shape[1],
            threadgroup_position_in_grid.x, threadgroup_position_in_grid.y,
            simdgroup_index_in_threadgroup, thread_index_in_simdgroup);
    """,
)


def takes_values(matrices: HeadMatrices, R: int) -> bool:
    """Return True if the kernel reads these matrices of rows of R numbers."""
    try:
        layout = matrix_of(matrices, matrices.width)
    except UnsupportedError:
        return False
    known = matrices.heads is None and matrices.width == R <= MOST_COLUMNS
    return known and _values_rows(layout, matrices.count, R, most_threads()) is not None


def _values_rows(layout: Matrix, out: int, R: int, threads: int) -> dict[str, int] | None:
    """Template arguments for rows of the matrices: each simdgroup has equally many."""
    simdgroups = SIMDGROUPS if threads >= 32 * SIMDGROUPS else SIMDGROUPS // 2
    narrow, rows = narrow_rows(layout, out, R), out // simdgroups
    if R % 32 or out % simdgroups or narrow is None:
        return None
    numbers = narrow["V"] * (32 // layout.bits if layout.bits else 1)
    even = rows * R % (32 * numbers) == 0 and rows * R // (32 * numbers) <= MOST_STEPS
    return {"ROWS": rows, "V": narrow["V"], "SIMDGROUPS": simdgroups} if even else None


def attend_values(
    partial: mx.array, stats: mx.array, matrices: HeadMatrices, dtype: mx.Dtype
) -> mx.array:
    """The module's formula in `dtype`, for matrices that it :func:`takes`.

    Raises:
        UnsupportedError: MLX drives no GPU.
    """
    layout = matrix_of(matrices, matrices.width)
    launch = _values_launch(
        partial.shape, matrices.weight.shape, layout, matrices.first, matrices.count, dtype,
        most_threads(),
    )  # fmt: skip
    return VALUES_KERNEL(partial, stats, *arrays_of(matrices), **launch)[0]


@functools.lru_cache(maxsize=64)
def _values_launch(
    partial: tuple[int, ...],
    weight: tuple[int, ...],
    layout: Matrix,
    first: int,
    out: int,
    dtype: mx.Dtype,
    threads: int,
) -> dict[str, Any]:
    (B, _, H, R), rows = partial, _values_rows(layout, out, partial[3], threads)
    assert rows is not None, "joins_values() was not asked"
    return {
        "template": {
            **{"T": dtype, **rows, "HEADS": H},
            **{"DV": R, "OUT": out, "FIRST": first, "BLOCK": weight[1], "PACKS": weight[2]},
            **{"BITS": layout.bits, "GROUP": layout.group},
            "EXACT": dtype == mx.float32,
        },
        "grid": (32 * rows["SIMDGROUPS"] * H, B, 1),
        "threadgroup": (32 * rows["SIMDGROUPS"], 1, 1),
        "output_shapes": [(B, H, 1, out)],
        "output_dtypes": [dtype],
    }


# Numbers of keys and values that are held together: 128 heads of 2048 positions, a few heads of
# very long prompts.
VALUES_AT_ONCE = 128 << 20


def latent_attention_fused(
    q_latent,
    q_rotary,
    latents,
    rotary_keys,
    *,
    length,
    scale,
    mask,
    start=None,
    tail=None,
    values=None,
):
    """Compute the absorbed form in one launch. Over parts of the keys a second launch joins them
    and applies `values`. The reference takes a mask that is an array.

    Raises:
        ShapeError: Shapes or dtypes do not fit together, R is no multiple of 64 or P of 16, or
            they are too large for threadgroup memory (R 512 in float32 on Metal).
        UnsupportedError: MLX drives no GPU.
    """
    if isinstance(mask, mx.array):
        return latent_attention(
            q_latent, q_rotary, latents, rotary_keys,
            length=length, scale=scale, mask=mask, start=start, tail=tail, values=values,
        )  # fmt: skip
    R, P = latents.shape[-1], rotary_keys.shape[-1]
    if q_rotary.shape != (*q_latent.shape[:3], P) or (*latents.shape[:3], P) != rotary_keys.shape:
        raise ShapeError(
            f"latent_attention: q_rotary {q_rotary.shape} and rotary_keys {rotary_keys.shape} do "
            f"not fit q_latent {q_latent.shape} and latents {latents.shape}."
        )
    if latents.shape[1] != 1 or R % 64:
        raise ShapeError(
            f"latent_attention: latents {latents.shape} must be [B, 1, S, R], R a multiple of 64."
        )
    others = {"q_rotary": q_rotary, "latents": latents, "rotary_keys": rotary_keys}
    check_dtypes("latent_attention", q_latent.dtype, others)
    call = Call(
        "latent_attention", q_latent.shape, latents.shape, latents.shape, None, q_latent.dtype,
        mask is not None, P, 0 if tail is None else tail[0].shape[2],
    )  # fmt: skip
    if tail is not None:
        check_tail(call, *tail)
    options = {"scale": scale, "length": length, "start": start, "tail": tail}
    attend = functools.partial(
        run, call, q_latent, latents, latents, rotary=(q_rotary, rotary_keys), **options
    )
    if values is None:
        return attend()
    parts = plan_of(backend().name, call).join is not None
    if parts and q_latent.shape[2] == 1 and takes_values(values, R):
        join = functools.partial(attend_values, matrices=values, dtype=q_latent.dtype)
        return attend(join=join)
    return head_product_fused(attend(), values)


def latent_prefill_expanded(
    q,
    q_rotary,
    latents,
    rotary_keys,
    *,
    expand,
    length,
    scale,
    mask,
    start=None,
    values_at_once=VALUES_AT_ONCE,
):
    """:func:`~mlx_moeflux.kernels.mla.latent.latent_prefill`: keys and values of some heads, then
    attention over them, without scores in device memory. A mask that is an array goes to the
    reference.

    values_at_once: Numbers of keys and values that are held together, see :func:`heads_at_once`.

    Evaluates: each stretch of heads, unless one takes all.

    Raises:
        ShapeError: Shapes or dtypes do not fit together, Dn or Dr is no multiple of 16 or Dv of 32,
            or they are too large for threadgroup memory.
        UnsupportedError: MLX drives no GPU.
    """
    if isinstance(mask, mx.array):
        return latent_prefill(
            q, q_rotary, latents, rotary_keys,
            expand=expand, length=length, scale=scale, mask=mask, start=start,
        )  # fmt: skip
    (B, T, H, D), Dr, parts = q.shape, q_rotary.shape[3], []
    rows, rotary = latents[:, :, :length], rotary_keys[:, :, :length]
    heads = heads_at_once(B, H, D - Dr, length, values_at_once)
    if q_rotary.shape != (B, H, T, Dr) or rotary.shape[1::2] != (1, Dr) or Dr >= D:
        raise ShapeError(
            f"latent_prefill: q_rotary {q_rotary.shape} and rotary_keys {rotary_keys.shape} do not "
            f"fit q {q.shape}."
        )
    options = {"scale": scale, "length": length, "start": start}
    for first in range(0, H, heads):
        own = slice(first, min(first + heads, H))
        k, v = expand(rows, own.start, own.stop)
        tensors = {"q_rotary": q_rotary, "keys": k, "rotary_keys": rotary, "values": v}
        check_dtypes("latent_prefill", q.dtype, tensors)
        queries, turned = q, (q_rotary[:, own], rotary)
        call = Call(
            "latent_prefill", (B, own.stop - first, T, D - Dr), k.shape, v.shape, None, q.dtype,
            mask is not None, Dr, expanded=True, q_heads=H,
        )  # fmt: skip
        if "QH" not in plan_of(backend().name, call).options["template"]:
            call = call._replace(q_heads=0)
            queries = q[:, :, own, : D - Dr].swapaxes(1, 2)
        parts.append(run(call, queries, k, v, **options, rotary=turned, first_head=first))
        if heads < H:
            # Else MLX makes the keys and values of many heads before it needs them.
            mx.eval(parts[-1])
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=1)


def heads_at_once(
    B: int, H: int, Dn: int, length: int, values_at_once: int = VALUES_AT_ONCE
) -> int:
    """Return how many heads' keys and values are computed together, both of width Dn. They have at
    most `values_at_once` numbers, unless one head has more."""
    most = max(1, values_at_once // (B * length * 2 * Dn))
    return -(-H // -(-H // most))


def prepare_workload(s: Sizes, n: int, x: Normal) -> Arguments:
    frequencies = 1e4 ** (-mx.arange(0, s.Dr, 2) / s.Dr)
    options = {"norm": x(s.latent), "eps": 1e-6, "frequencies": frequencies, "offset": 3}
    arrays = (x(s.B, n, s.heads, s.Dn + s.Dr), x(s.B, n, s.latent + s.Dr))
    return arrays, options | {"factor": 1.2, "interleaved": True}


LATENT_PREPARE = Operation(
    name="latent_prepare",
    reference=latent_prepare,
    others={"fused": Implementation(latent_prepare_fused, kernels=(_WHOLE, _TURNED))},
    size=slice(1, 2),
    tokens={"q": 1, "kv": 1},
    proof=Proof(example=prepare_workload, workloads={"": prepare_workload}, shrunk=("kv",)),
)


def _product_workload(s: Sizes, n: int, x: Normal) -> Arguments:
    parts = examples.quantised(s, x, s.heads, s.Dn + s.Dv, s.latent)
    return (x(s.B, s.heads, n, s.latent), HeadMatrices(*parts, s.spec, s.Dn, s.Dv)), {}


HEAD_PRODUCT = Operation(
    name="head_product",
    reference=head_product,
    others={
        "fused": Implementation(head_product_fused, kernels=(_MATVEC, _NARROW, _VECMAT)),
        "dequantised": Implementation(head_product_dequantised),
    },
    size=slice(0, 3, 2),
    tokens={"x": 2},
    proof=Proof(
        example=_product_workload,
        example_tokens=1,
        workloads={"": _product_workload},
        by_rows=True,
        keeps_axes=True,
    ),
)


def _attention_workload(s: Sizes, n: int, x: Normal) -> Arguments:
    rows = s.keys + -(-n // s.step) * s.step
    cache = x(s.B, 1, rows, s.latent), x(s.B, 1, rows, s.Dr)
    return (x(s.B, s.heads, n, s.latent), x(s.B, s.heads, n, s.Dr), *cache), {
        "length": s.keys + n, "scale": (s.Dn + s.Dr) ** -0.5, "mask": None if n == 1 else "causal"
    }  # fmt: skip


LATENT_ATTENTION = Operation(
    name="latent_attention",
    reference=latent_attention,
    others={
        "fused": Implementation(
            latent_attention_fused,
            kernels=(
                *SHARED,
                latent_token.KERNEL,
                *HEAD_PRODUCT.others["fused"].kernels,
                VALUES_KERNEL,
            ),
        )
    },
    size=slice(2, 3),
    tokens={"q_latent": 2, "q_rotary": 2},
    proof=Proof(
        example=_attention_workload,
        workloads={"": _attention_workload},
        positions={"latents": 2, "rotary_keys": 2},
        apart=True,
    ),
)


def _prefill_workload(s: Sizes, n: int, x: Normal) -> Arguments:
    w_k, w_v = x(s.heads, s.latent, s.Dn), x(s.heads, s.latent, s.Dv)

    def expand(latent: mx.array, first: int, last: int) -> tuple[mx.array, mx.array]:
        return latent @ w_k[first:last], latent @ w_v[first:last]

    (_, *rest), options = _attention_workload(s, n, x)
    options |= {"expand": expand, "mask": "causal"}
    return (x(s.B, n, s.heads, s.Dn + s.Dr), *rest), options


LATENT_PREFILL = Operation(
    name="latent_prefill",
    reference=latent_prefill,
    others={"expanded": Implementation(latent_prefill_expanded, kernels=SDPA_KERNELS)},
    size=slice(1, 2),
    tokens={"q": 1, "q_rotary": 2},
    proof=Proof(
        example=_prefill_workload,
        workloads={"": _prefill_workload},
        positions={"latents": 2, "rotary_keys": 2},
    ),
)

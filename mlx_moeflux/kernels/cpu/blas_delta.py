"""A gated delta net between its projections on the CPU, through numpy: delta_mixer.

Formulas and shapes are in :mod:`mlx_moeflux.kernels.delta.delta_mixer` and
:mod:`mlx_moeflux.kernels.delta.gated_delta`. Products are of one size for every sequence, head and
chunk, each on its own, so that a sequence gets the same bits whichever others are beside it.

One core, Hk 4, Hv 8, D 128, microseconds, beside the operations of MLX: 148 and 330 for a token,
2,413 and 14,975 for 64.
"""

from __future__ import annotations

import functools
from typing import Any

import mlx.core as mx
import numpy as np

from mlx_moeflux.errors import UnsupportedError
from mlx_moeflux.kernels.cpu import blas
from mlx_moeflux.kernels.delta.gated_delta import CHUNK, L2_EPSILON, token_by_token

_GATES = {"silu": blas.silu, "sigmoid": blas.sigmoid}

# More tokens are faster as a chunk, with states of 32 to 128 squared.
MOST_SINGLE = 3 * CHUNK // 4


@blas.quiet
def delta_mixer_blas(
    qkv,
    z,
    a,
    b,
    *,
    conv_weight,
    conv_state,
    state,
    a_log,
    dt_bias,
    norm_weight,
    eps,
    mask=None,
    lengths=None,
    gate="silu",
    every=False,
    steps=None,
) -> tuple[mx.array, Any, Any]:
    """Chunks of tokens by matrix products, a few tokens one by one. `steps` plays no part.

    Raises:
        UnsupportedError: qkv is not float32, MLX is tracing, or lengths are given.
    """
    if lengths is not None or (every and mask is not None):
        raise UnsupportedError("delta_mixer=blas takes no lengths, and no mask beside `every`.")
    if every:
        around = {"conv_weight": conv_weight, "a_log": a_log, "dt_bias": dt_bias, "gate": gate}
        around |= {"norm_weight": norm_weight, "eps": eps}
        parts = blas.views_of(qkv, z, a, b, float32=4)
        tokens = (
            [None if part is None else mx.array(part[:, t : t + 1]) for part in parts]
            for t in range(qkv.shape[1])
        )
        mixer = functools.partial(delta_mixer_blas, **around)
        return token_by_token(mixer, tokens, conv_state, state)
    Hv, Dv, Dk = state.shape[1:]
    exact, others = (qkv, z, a, b, conv_state, state), (conv_weight, a_log, dt_bias, norm_weight)
    views = blas.views_of(*exact, *others, mask, float32=6)
    x, outer, a_row, b_row, before, former, *parameters, real = views
    taps, decays, bias, scale = map(blas.single, parameters)
    if outer is None:
        ends = np.cumsum([x.shape[-1] - Hv * Dv - 2 * Hv, Hv * Dv, Hv])
        x, outer, a_row, b_row = np.split(x, ends, axis=-1)
    B, T, D = x.shape
    keys = (D - Hv * Dv) // 2
    if real is not None:
        x = np.where(real[..., None], x, np.float32(0.0))
    mixed, window = _convolved(x, taps, before)
    heads = mixed.reshape(B, T, -1)
    q = _unit(heads[..., :keys].reshape(B, T, -1, Dk)) * np.float32(Dk**-0.5)
    k = _unit(heads[..., keys : 2 * keys].reshape(B, T, -1, Dk))
    v = heads[..., 2 * keys :].reshape(B, T, Hv, Dv)
    log_decay = -np.exp(decays) * np.logaddexp(a_row + bias, np.float32(0.0))
    beta = blas.sigmoid(b_row)
    if real is not None:
        log_decay = np.where(real[..., None], log_decay, np.float32(0.0))
        beta = np.where(real[..., None], beta, np.float32(0.0))
    compute = _token_by_token if T <= MOST_SINGLE else _chunk_by_chunk
    y, new_state = compute(q, k, v, log_decay, beta, former)
    y = y * (1.0 / np.sqrt((y * y).mean(axis=-1, keepdims=True) + np.float32(eps)))
    y *= scale
    y *= _GATES[gate](outer).reshape(y.shape)
    return mx.array(y.reshape(B, T, Hv * Dv)), mx.array(window), mx.array(new_state)


def _convolved(
    x: np.ndarray, taps: np.ndarray, before: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """x ``[B, T, D]``, taps ``[D, W]``, before ``[B, W - 1, D]`` -> silu of the convolution, and
    the new window."""
    T, W = x.shape[1], taps.shape[1]
    window = np.concatenate([before, x], axis=1)
    total = window[:, :T] * taps[:, 0]
    for j in range(1, W):
        total += window[:, j : j + T] * taps[:, j]
    return blas.silu(total), window[:, T:]


def _unit(x: np.ndarray) -> np.ndarray:
    return x * (1.0 / np.sqrt((x * x).sum(axis=-1, keepdims=True) + np.float32(L2_EPSILON)))


def _token_by_token(q, k, v, log_decay, beta, state) -> tuple[np.ndarray, np.ndarray]:
    """:func:`~mlx_moeflux.kernels.delta.gated_delta.gated_delta_recurrent`."""
    repeats = v.shape[2] // k.shape[2]
    q, k = np.repeat(q, repeats, axis=2), np.repeat(k, repeats, axis=2)  # [B, T, Hv, Dk]
    decay = np.exp(log_decay)
    y = np.empty_like(v)
    for t in range(v.shape[1]):
        state = state * decay[:, t, :, None, None]
        delta = v[:, t] - (state @ k[:, t, :, :, None])[..., 0]  # [B, Hv, Dv]
        delta *= beta[:, t, :, None]
        state += delta[..., None] * k[:, t, :, None, :]
        y[:, t] = (state @ q[:, t, :, :, None])[..., 0]
    return y, state


def _chunk_by_chunk(q, k, v, log_decay, beta, state) -> tuple[np.ndarray, np.ndarray]:
    """:func:`~mlx_moeflux.kernels.delta.gated_delta.gated_delta_chunked`, whose names these are."""
    B, T, Hk, Dk = k.shape
    Hv, Dv = v.shape[2:]
    padding, R = -T % CHUNK, Hv // Hk
    n = (T + padding) // CHUNK

    def heads(x, groups):  # [B, T, H, D] -> [B, Hk, R, n, CHUNK, D]
        x = np.pad(x, ((0, 0), (0, padding), (0, 0), (0, 0)))
        x = x.reshape(B, n, CHUNK, Hk, groups, -1).transpose(0, 3, 4, 1, 2, 5)
        return np.ascontiguousarray(x)

    q, k, v = heads(q, 1), heads(k, 1), heads(v, R)
    beta, log_decay = heads(beta[..., None], R), heads(log_decay[..., None], R)[..., 0]
    lower, strictly = _triangles()
    between = np.exp(np.cumsum(np.where(strictly, log_decay[..., None], np.float32(0.0)), axis=-2))
    since_start = np.exp(np.cumsum(log_decay, axis=-1))[..., None]  # [..., CHUNK, 1]
    kt = k.swapaxes(-1, -2)
    inverse = _unit_lower_inverse(np.where(strictly, beta * between * (k @ kt), np.float32(0.0)))
    scores = np.where(lower, between * (q @ kt), np.float32(0.0))  # [..., CHUNK, CHUNK]
    fresh = inverse @ (beta * v)  # [..., CHUNK, Dv]
    reads = np.concatenate([inverse @ (beta * since_start * k), since_start * q], axis=-2)
    writes = (between[..., -1, :, None] * k).swapaxes(-1, -2)  # [..., Dk, CHUNK]
    left = since_start[..., -1, :, None]  # [B, Hk, R, n, 1, 1]
    s = state.reshape(B, Hk, R, Dv, Dk).swapaxes(-1, -2)  # [B, Hk, R, Dk, Dv]
    y = np.empty((B, Hk, R, n, CHUNK, Dv), np.float32)
    for c in range(n):
        read = reads[:, :, :, c] @ s
        u = fresh[:, :, :, c] - read[..., :CHUNK, :]
        y[:, :, :, c] = read[..., CHUNK:, :] + scores[:, :, :, c] @ u
        s = left[:, :, :, c] * s + writes[:, :, :, c] @ u
    y = y.transpose(0, 3, 4, 1, 2, 5).reshape(B, T + padding, Hv, Dv)[:, :T]
    return y, np.ascontiguousarray(s.swapaxes(-1, -2)).reshape(B, Hv, Dv, Dk)


@functools.cache
def _triangles() -> tuple[np.ndarray, np.ndarray]:
    ones = np.ones((CHUNK, CHUNK), bool)
    return np.tril(ones), np.tril(ones, k=-1)


@functools.cache
def _joins() -> list[np.ndarray]:
    """For each size of inverted blocks, where the blocks lie that join two neighbours."""
    row, size, joins = np.arange(CHUNK), 1, []
    while size < CHUNK:
        block = row // size
        joins.append((block[:, None] == block[None, :] + 1) & (block[:, None] % 2 == 1))
        size *= 2
    return joins


def _unit_lower_inverse(a: np.ndarray) -> np.ndarray:
    """(I + a)^-1; see gated_delta.py."""
    inverse = np.eye(CHUNK, dtype=np.float32)
    for where in _joins():
        inverse = inverse - inverse @ np.where(where, a, np.float32(0.0)) @ inverse
    return inverse

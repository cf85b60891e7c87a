"""Batched cache entries against their sequences alone: merging, padding, joining and leaving must
keep every sequence's rows and states bit for bit (attention over them to 1e-6)."""

import copy

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.cache import KVCache, RecurrentCache, check_positions
from mlx_moeflux.errors import CacheError
from mlx_moeflux.kernels.delta.delta_mixer import causal_conv_silu
from mlx_moeflux.kernels.delta.gated_delta import gated_delta_recurrent
from tests.cache.entries import DK, DV, HKV, filled, recurrent, rows, same, tokens_of


@pytest.mark.parametrize("sizes", [[4, 9, 1], [3, 3], [0, 6, 0, 300], [0, 0]])
def test_merge_then_extract_gives_the_singles_back(sizes):
    singles = [filled(T) if T else (KVCache(), None, None) for T in sizes]
    merged = singles[0][0].merge([single for single, _, _ in singles])
    assert merged.seen() == sizes
    assert merged.size() == max(sizes)
    assert merged.batch_size == len(sizes)
    assert merged.empty() == (max(sizes) == 0)
    uniform = len(set(sizes)) == 1
    assert isinstance(merged.offset, int) == uniform
    assert (merged.offset == sizes[0]) if uniform else (merged.offset.tolist() == sizes)
    for i, (_, keys, values) in enumerate(singles):
        out = merged.extract(i)
        assert out.offset == sizes[i]
        if keys is not None:
            assert same(out.views()[0], keys)
            assert same(out.views()[1], values)
    states = [recurrent(T) if T else RecurrentCache() for T in sizes]
    batch = RecurrentCache.merge(states)
    assert batch.seen() == sizes
    for i, state in enumerate(states):
        out = batch.extract(i)
        assert out.offset == sizes[i]
        if state.conv is not None:
            assert same(out.conv, state.conv)
            assert same(out.delta, state.delta)
        elif batch.conv is not None:
            assert not out.conv.any().item()
            assert not out.delta.any().item()


def test_extend_and_filter_keep_each_sequence():
    first, second = [filled(T) for T in (2, 8)], [filled(T) for T in (300, 5)]
    batch = KVCache.merge([single for single, _, _ in first])
    late = KVCache.merge([single for single, _, _ in second])
    batch.extend(late)
    assert batch.offset.tolist() == [2, 8, 300, 5]
    assert late.seen() == [300, 5]
    kept = [(single, keys, values) for single, keys, values in (second[1], first[1])]
    batch.filter(mx.array([3, 1]))
    assert batch.columns == 8, "columns that pad every sequence go"
    for i, (_, keys, values) in enumerate(kept):
        mine = tokens_of(batch, i)
        assert same(mine[0], keys[0])
        assert same(mine[1], values[0])
    new = rows(1, B=2)
    batch.update_and_fetch(*new)
    assert same(tokens_of(batch, 0)[0], mx.concatenate([kept[0][1][0], new[0][0]], axis=1))
    a, b = recurrent(2), recurrent(300)
    delta = [a.delta, b.delta]
    a.extend(b)
    a.filter([1, 0])
    assert a.seen() == [300, 2]
    assert same(a.delta, mx.concatenate(delta[::-1]))
    a.filter([1])
    assert a.offset == 2
    with pytest.raises(CacheError, match="holds 2 sequences but 1"):
        batch.update_and_fetch(*rows(1))


@pytest.mark.parametrize("chunk", [2, 3, 6])
def test_right_padded_prompt_becomes_left_padding(chunk):
    """Chunks in which a sequence ends, or that are padding only, included."""
    history, lengths = [3, 0, 260], [6, 4, 1]
    singles = [filled(T)[0] if T else KVCache() for T in history]
    merged = KVCache.merge([copy.deepcopy(single) for single in singles])
    states = RecurrentCache.merge([recurrent(T) if T else RecurrentCache() for T in history])
    keys, values = rows(6, B=3)
    for entry in (merged, states):
        entry.prepare(lengths=lengths, right_padding=[6 - n for n in lengths])
    for start in range(0, 6, chunk):
        real = [[start + t < n for t in range(chunk)] for n in lengths]
        for entry in (merged, states):
            assert entry.real_tokens(chunk).tolist() == real
            assert entry.lengths.tolist() == [n - start for n in lengths]
        merged.update_and_fetch(
            keys[:, :, start : start + chunk], values[:, :, start : start + chunk]
        )
        states.advance(chunk)
        done = [T + min(n, start + chunk) for T, n in zip(history, lengths, strict=True)]
        assert check_positions([merged, states]) == done
    for entry in (merged, states):
        with pytest.raises(CacheError, match="finalize"):
            entry.extract(0)
        entry.finalize()
        assert entry.lengths is None
        assert entry.real_tokens(4) is None
    assert merged.offset.tolist() == states.offset.tolist() == [9, 4, 261]
    for i, single in enumerate(singles):
        single.update_and_fetch(
            keys[i : i + 1, :, : lengths[i]], values[i : i + 1, :, : lengths[i]]
        )
        for mine, alone in zip(tokens_of(merged, i), single.views(), strict=True):
            assert same(mine, alone[0])


def test_attention_over_a_padded_batch_equals_each_sequence_alone():
    sizes, T = [4, 1, 7], 3
    singles = [filled(n) for n in sizes]
    merged = KVCache.merge([copy.deepcopy(single) for single, _, _ in singles])
    q, (keys, values) = mx.random.normal((3, HKV, T, DK)), rows(T, B=3)

    def attend(cache, q, keys, values):
        mask = cache.make_mask(q.shape[2])
        keys, values = cache.update_and_fetch(keys, values)
        return mx.fast.scaled_dot_product_attention(q, keys, values, scale=0.4, mask=mask)

    for t in (slice(0, 1), slice(1, 3)):
        together = attend(merged, q[:, :, t], keys[:, :, t], values[:, :, t])
        for i, (single, _, _) in enumerate(singles):
            pick = slice(i, i + 1), slice(None), t
            alone = attend(single, q[pick], keys[pick], values[pick])
            error = np.abs(np.asarray(together[i] - alone[0])).max()
            assert error <= 1e-6


@pytest.mark.parametrize("window", [None, 1, 4, 50])
def test_masks_follow_their_definition(window):
    cache = KVCache.merge([filled(2)[0], filled(6)[0]])
    for T in (1, 3):
        mask = np.asarray(cache.make_mask(T, window_size=window))
        assert mask.shape == (2, 1, T, 6 + T)
        for b, padding in enumerate([4, 0]):
            for t in range(T):
                for s in range(6 + T):
                    visible = padding <= s <= 6 + t and (window is None or 6 + t - s < window)
                    assert mask[b, 0, t, s] == visible
    plain = filled(6)[0]
    assert plain.make_mask(1) is None
    assert plain.make_mask(3) == "causal"
    assert plain.make_mask(3, return_array=True).shape == (1, 1, 3, 9)
    assert plain.make_mask(1, window_size=6).shape == (1, 1, 1, 7)
    assert plain.make_mask(1, window_size=7) is None


@pytest.mark.parametrize("window", [1, 3, 6, 7, 50])
def test_a_token_sees_from_the_first_key_of_its_window_on(window):
    """The first key, instead of a mask, gives a step the same arguments traced and untraced."""
    for cache in (KVCache.merge([filled(2)[0], filled(6)[0]]), filled(6)[0]):
        seen, found = cache.make_mask(1, window_size=window), cache.windowed(1, window)
        if window > 6:
            assert found == {}
            continue
        assert found["mask"] is None
        starts = np.broadcast_to(np.asarray(found["start"]), (seen.shape[0],))
        assert starts.tolist() == [int(np.argmax(row)) for row in np.asarray(seen)[:, 0, 0]]


def test_left_padding_never_makes_nan_and_never_changes_a_token():
    lengths, T = [5, 2, 4], 5
    padding = [T - n for n in lengths]
    cache, (keys, values) = KVCache(), rows(T, B=3)
    q = mx.random.normal((3, HKV, T, DK))
    cache.prepare(left_padding=padding)
    assert cache.real_tokens(T).tolist() == [[t >= p for t in range(T)] for p in padding]
    assert cache.positions(T).tolist() == [-p for p in padding]
    mask = cache.make_mask(T)
    assert mask.any(axis=-1).all().item(), "softmax over nothing is NaN in some kernels"
    seen = cache.update_and_fetch(keys, values)
    y = mx.fast.scaled_dot_product_attention(q, *seen, scale=0.4, mask=mask)
    assert np.isfinite(np.asarray(y)).all()
    assert cache.seen() == lengths
    for i, p in enumerate(padding):
        pick = slice(i, i + 1), slice(None), slice(p, None)
        alone = mx.fast.scaled_dot_product_attention(
            q[pick], keys[pick], values[pick], scale=0.4, mask="causal"
        )
        assert np.abs(np.asarray(y[pick] - alone)).max() <= 1e-6


def delta_net_call(cache, x, weight, q, k, v, g, beta):
    """What a gated delta net layer does with its cache, on the shipped references."""
    B, T, D = x.shape
    mask = cache.make_mask(T)
    if mask is not None:
        x = mx.where(mask[..., None], x, 0.0)
    conv = mx.zeros((B, weight.shape[1] - 1, D)) if cache.conv is None else cache.conv
    delta = mx.zeros((B, v.shape[2], DV, DK)) if cache.delta is None else cache.delta
    y, cache.conv = causal_conv_silu(x, weight, conv, lengths=cache.lengths)
    o, cache.delta = gated_delta_recurrent(q, k, v, log_decay=g, beta=beta, state=delta, mask=mask)
    cache.advance(T)
    return y, o


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("chunk", [1, 2, 7])
def test_padding_never_touches_conv_or_delta(side, chunk):
    """Bit for bit, in chunks in which sequences begin, end, or are padding only."""
    lengths, width, D = [7, 3, 1, 5], 4, 6
    B, T, Hk, Hv = len(lengths), 7, 2, 4
    weight = mx.random.normal((D, width))
    inputs = [
        mx.random.normal((B, T, D)),
        mx.random.normal((B, T, Hk, DK)),
        mx.random.normal((B, T, Hk, DK)),
        mx.random.normal((B, T, Hv, DV)),
        -mx.random.uniform(0, 2, (B, T, Hv)),
        mx.random.uniform(0, 1, (B, T, Hv)),
    ]
    batch = RecurrentCache()
    left = [T - n if side == "left" else 0 for n in lengths]
    if side == "left":
        batch.prepare(left_padding=left)
        assert batch.left_padding.tolist() == left
    else:
        batch.prepare(lengths=lengths, right_padding=[T - n for n in lengths])
    outputs = []
    for start in range(0, T, chunk):
        x, *rest = (a[:, start : start + chunk] for a in inputs)
        outputs.append(delta_net_call(batch, x, weight, *rest))
    batch.finalize()
    assert batch.seen() == lengths
    for i, n in enumerate(lengths):
        alone, real = RecurrentCache(), slice(left[i], left[i] + n)
        x, *rest = (a[i : i + 1, real] for a in inputs)
        y, o = delta_net_call(alone, x, weight, *rest)
        assert same(batch.conv[i], alone.conv[0])
        assert same(batch.delta[i], alone.delta[0])
        for which, mine in ((0, y), (1, o)):
            together = mx.concatenate([out[which] for out in outputs], axis=1)
            assert same(together[i, real], mine[0])


def test_a_sequence_that_joins_later_continues_exactly():
    """Merge, right-padded prompt, decode, leave: the tokens each sequence saw, in order."""
    histories = {name: [] for name in "abc"}

    def append(cache, names, T, lengths=None):
        keys, values = rows(T, B=len(names))
        cache.update_and_fetch(keys, values)
        for i, name in enumerate(names):
            histories[name].append(keys[i, :, : (lengths or {}).get(name, T)])

    running = KVCache.merge([KVCache(), KVCache()])
    running.prepare(lengths=[3, 5], right_padding=[2, 0])
    append(running, "ab", 5, {"a": 3})
    running.finalize()
    append(running, "ab", 1)
    joining = KVCache.merge([KVCache()])
    append(joining, "c", 258)
    running.extend(joining)
    append(running, "abc", 1)
    left = running.extract(2)
    running.filter([0, 1])
    append(running, "ab", 1)
    for i, name in enumerate("ab"):
        assert same(tokens_of(running, i)[0], mx.concatenate(histories[name], axis=1))
    assert same(left.views()[0][0], mx.concatenate(histories["c"], axis=1))
    assert running.seen() == [6, 8]

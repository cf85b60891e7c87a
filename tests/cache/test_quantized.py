"""Oracle: the rows in full precision, and MLX's own quantisation of them."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.cache import KVCache
from mlx_moeflux.cache.kv import quantized
from mlx_moeflux.cli import main
from mlx_moeflux.errors import InputError
from mlx_moeflux.experts.budget import KV_POSITIONS, RESERVE_BYTES, Memory
from mlx_moeflux.loading import load_model, steps
from tests.cache.entries import same
from tests.models_at_hand import TWIN, model_of, same_bits, tokens_of


@pytest.mark.parametrize("dtype", [mx.float32, mx.bfloat16])
@pytest.mark.parametrize("group_size", [32, 64, 128])
@pytest.mark.parametrize("bits", [4, 8])
def test_rows_come_back_as_mlx_would_give_them(bits, group_size, dtype):
    kind = quantized(KVCache, bits=bits, group_size=group_size, dtype=dtype)
    cache, widths = kind(), (group_size, 3 * group_size)
    rows = [mx.random.normal((2, 3, 300, D)).astype(dtype) for D in widths]
    for start, stop in ((0, 5), (5, 6), (6, 300)):
        got = cache.update_and_fetch(*(r[:, :, start:stop] for r in rows))
    for array, original in zip(got, rows, strict=True):
        parts = mx.quantize(original, group_size=group_size, bits=bits)
        expected = mx.dequantize(*parts, group_size=group_size, bits=bits)
        assert array.dtype == dtype
        assert mx.array_equal(array, expected).item()
        error = mx.abs(array - original).astype(mx.float32).max().item()
        span = (original.max() - original.min()).item()
        rounding = 2**-8 if dtype == mx.bfloat16 else 2**-20
        assert error <= span / 2**bits + span * rounding
    size = group_size * bits / 8 + 2 * dtype.size
    assert cache.nbytes == 512 * 2 * 3 * 4 * size
    whole = KVCache()
    whole.update_and_fetch(*rows)
    assert cache.nbytes < whole.nbytes


def test_it_is_a_cache_like_any_other():
    kind = quantized(KVCache, bits=8, group_size=32, dtype=mx.float32)
    assert quantized(KVCache, bits=8, group_size=32, dtype=mx.float32) is kind
    assert kind.kind == "attention, 8 bits in groups of 32"
    singles = []
    for T in (3, 7):
        singles.append(kind())
        singles[-1].update_and_fetch(
            mx.random.normal((1, 2, T, 32)), mx.random.normal((1, 2, T, 64))
        )
    merged = kind.merge(singles)
    for i, single in enumerate(singles):
        out = merged.extract(i)
        assert type(out) is kind
        assert all(map(same, out.views(), single.views()))
    (keys, values), length = merged.buffers(), merged.columns
    assert keys.shape == (2, 2, 7, 32)
    assert values.shape == (2, 2, 7, 64)
    assert length == 7


@pytest.mark.parametrize("bits", [4, 8])
def test_a_model_runs_on_them_and_says_so(bits):
    tokens = tokens_of(40)
    with (
        load_model(TWIN, dtype=mx.float32) as exact,
        load_model(TWIN, dtype=mx.float32, kv_bits=bits, kv_group_size=32) as model,
    ):
        cut, whole = model.make_cache(), exact.make_cache()
        for state, one in ((cut, model), (whole, exact)):
            for start in range(0, 40, 8):
                logits = one(tokens[:, start : start + 8], state, last_only=True)
            mx.eval(logits)
        a, b = (np.array(one(mx.array([[7]]), s)) for one, s in ((model, cut), (exact, whole)))
        error = np.abs(a - b).max() / np.abs(b).max()
        assert np.isfinite(error)
        assert 0 < error <= {4: 0.3, 8: 0.02}[bits]
        assert model.bytes_per_position() == exact.bytes_per_position() * (bits * 32 + 64) // 1024
        assert cut.nbytes == model.state_bytes(41) < exact.state_bytes(41) == whole.nbytes
        assert model.store.stats().lossy == [f"kv_bits {bits}"]
        assert model.state_spec().identity != exact.state_spec().identity


def test_the_plan_counts_them(monkeypatch):
    with load_model(TWIN, dtype=mx.float32) as exact:
        longest = min(KV_POSITIONS, exact.config.max_position_embeddings)
        needs = RESERVE_BYTES + exact.plan.trunk_bytes + exact.plan.expert_bytes
        needs += exact.state_bytes(longest)
    memory = Memory("planned", needs, needs - 1, "one byte too few")
    monkeypatch.setattr(steps, "measure_memory", lambda: memory)
    for bits, resident in ((None, False), (8, True)):
        with load_model(TWIN, dtype=mx.float32, kv_bits=bits, kv_group_size=32) as model:
            assert model.plan.resident == resident


def test_a_state_in_bits_never_meets_one_without(tmp_path):
    with model_of("4 bits", tmp_path) as cut, model_of("hybrid", tmp_path) as exact:
        state = cut.make_cache()
        mx.eval(cut(tokens_of(5), state))
        state.save(tmp_path / "state")
        with pytest.raises(ValueError, match="another model"):
            exact.make_cache().load(tmp_path / "state")
        exact.quantize_cache(4, 32)
        other = exact.make_cache()
        other.restore(state.snapshot())
        probe = mx.array([[3]])
        assert same_bits(cut(probe, state), exact(probe, other))
        exact.quantize_cache(None)
        with pytest.raises(ValueError, match="of other kinds"):
            exact.make_cache().restore(state.snapshot())


def test_what_cannot_be_is_refused(capsys):
    for options, match in (
        ({"kv_bits": 3}, "kv_bits is 3; give 4 or 8"),
        ({"kv_bits": 8, "kv_group_size": 48}, "kv_group_size is 48; give 32, 64 or 128"),
        ({"kv_bits": 8}, "rows of 32 numbers have no groups of 64"),
    ):
        with pytest.raises(InputError, match=match):
            load_model(TWIN, **options)
    assert main(["generate", "-m", "3", "--kv-bits", "8", "--stats"]) == 0
    assert "lossy: kv_bits 8" in capsys.readouterr().err
    assert main(["generate", "-m", "3", "--kv-bits", "5"]) == 1
    assert "kv_bits is 5" in capsys.readouterr().err

"""Oracle: the file. Experts keep its dtypes in memory, resident or streamed, and are computed with
its numbers, in a trunk of any dtype."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.conversion.convert import convert
from mlx_moeflux.experts import compute
from mlx_moeflux.kernels.moe.expert_ffn import expert_ffn
from mlx_moeflux.loading import load_model
from tests.devices import seen_as
from tests.experts.helpers import random_call, random_experts
from tests.models.twins import GOLDEN

CODES = {"F32": mx.float32, "F16": mx.float16, "BF16": mx.bfloat16}
# Form of the experts, dtype of their floats (None: uint8), dtype of the trunk.
STORED = [
    ("4 bits", "F16", mx.bfloat16),
    ("4 bits", "F32", mx.bfloat16),
    ("8 bits", "BF16", mx.float16),
    ("3 bits", "F16", mx.bfloat16),
    ("floats", "F32", mx.bfloat16),
    ("floats", "F16", mx.float32),
    ("mxfp4", None, mx.bfloat16),
]
TOKENS = mx.array(np.random.default_rng(3).integers(0, 64, (2, 9)))


def rewrite(directory: Path, code: str | None, *, factor: float = 1.0007) -> Path:
    """Store the floats of the experts in a dtype, times a factor: numbers that shorter dtypes have
    not."""
    for file in directory.glob("*.safetensors") if code else ():
        tensors = mx.load(str(file))
        for name in tensors:
            if ".switch_mlp." in name and mx.issubdtype(tensors[name].dtype, mx.floating):
                wide = tensors[name].astype(mx.float32) * factor
                tensors[name] = wide.astype(CODES[code])
        mx.eval(tensors)
        mx.save_safetensors(str(file), tensors, {"format": "mlx"})
    return directory


def stored(out: Path, form: str, code: str | None) -> Path:
    """The experts of a twin in one form, in mlx-lm's layout."""
    options = {} if form == "floats" else {"quantize": True, "q_group_size": 32}
    if form == "mxfp4":
        options |= {"q_mode": form}
    elif form != "floats":
        options |= {"q_bits": int(form[0])}
    return rewrite(convert(GOLDEN / "qwen3_moe_top2", out, layout="safetensors", **options), code)


def logits(directory: Path, memory: str, dtype: mx.Dtype) -> np.ndarray:
    """Return the logits of a batch: a prompt and two steps; the experts have the file's dtypes."""
    options = {"expert_memory": memory, "dtype": dtype, "expert_threads": 1}
    with load_model(directory, **options) as model:
        assert model.plan.resident == (memory == "100%")
        cache = model.make_cache()
        parts = [model(part, cache) for part in (TOKENS[:, :7], TOKENS[:, 7:8], TOKENS[:, 8:])]
        assert {part.dtype for part in parts} == {dtype}
        found = np.array(mx.concatenate(parts, axis=1).astype(mx.float32))
        assert np.isfinite(found).all()
        layer, store = model.store.layers[0], model.store
        bank = store.whole(layer)[0] if model.plan.resident else store.bank(layer)
        held = {array.dtype for array in bank.flat} - {mx.uint32}
        in_file = {
            array.dtype
            for file in directory.glob("*.safetensors")
            for name, array in mx.load(str(file)).items()
            if ".switch_mlp." in name
        }
        assert held == in_file - {mx.uint32}
        if model.plan.resident:
            arrays = [bank.flat for bank in (store.whole(i)[0] for i in store.layers)]
            nbytes = sum(array.nbytes for flat in arrays for array in flat)
            assert nbytes == store.num_experts * sum(store.block_bytes.values())
        return found


@pytest.mark.parametrize(
    ("form", "code", "dtype"),
    [
        pytest.param(*each, marks=[pytest.mark.slow] * (each[:2] == ("4 bits", "F32")))
        for each in STORED
    ],
    ids=["-".join(map(str, each)) for each in STORED],
)
def test_both_stores_have_the_dtypes_of_the_file(form, code, dtype, tmp_path):
    directory = stored(tmp_path / "stock", form, code)
    expected = logits(directory, "100%", dtype)
    assert np.array_equal(logits(directory, "60%", dtype), expected)
    packed = convert(directory, tmp_path / "packed")
    with load_model(packed, expert_memory="60%", dtype=dtype, expert_threads=1) as model:
        given = np.array(model(TOKENS[:, :7]).astype(mx.float32))
    assert np.array_equal(given, expected[:, :7])


@pytest.mark.parametrize(
    ("form", "memory"),
    [
        ("4 bits", "60%"),
        ("floats", "100%"),
        pytest.param("4 bits", "100%", marks=pytest.mark.slow),
        pytest.param("floats", "60%", marks=pytest.mark.slow),
    ],
)
def test_the_numbers_are_those_of_the_file(form, memory, tmp_path):
    """Float16 numbers stored as float32 give the same bits; rounded to bfloat16 they do not."""
    short = stored(tmp_path / "short", form, "F16")
    wide = rewrite(stored(tmp_path / "wide", form, "F16"), "F32", factor=1.0)
    rounded = rewrite(stored(tmp_path / "rounded", form, "F16"), "BF16", factor=1.0)
    one, two, three = (logits(path, memory, mx.bfloat16) for path in (short, wide, rounded))
    assert np.array_equal(one, two)
    assert not np.array_equal(one, three)


def test_a_gpu_takes_rows_before_it_casts_them(monkeypatch):
    """Stock operations that meet two dtypes would cast the scales of every slot."""
    experts, seen, real = random_experts(num_experts=40), [], compute.expert_ffn

    def ffn(x, slots, bank):
        seen.append((x.dtype, bank.slots, bank.up.scales.dtype))
        return real(x, slots, bank)

    monkeypatch.setattr(compute, "device", seen_as("cuda"))
    monkeypatch.setattr(compute, "expert_ffn", ffn)
    x, *route = random_call(1, num_experts=40)
    for dtype in (mx.float16, mx.bfloat16):
        mx.eval(experts.resident().experts(3, x.astype(dtype), *route))
    assert seen == [(mx.float32, 3, mx.float32), (mx.bfloat16, 40, mx.bfloat16)]


@pytest.mark.parametrize("specs", ["4 bits", "floats"])
def test_stock_operations_group_no_rows(specs, monkeypatch):
    """MLX multiplies rows of ascending slots in tiles that depend on the other rows and slots."""
    given = {"specs": (None,) * 3} if specs == "floats" else {}
    experts, name = random_experts(**given), "gather_mm" if given else "gather_qmm"
    real, calls = getattr(mx, name), []

    def product(*args, **options):
        calls.append(options)
        return real(*args, **options)

    monkeypatch.setattr(mx, name, product)
    x, ids, weights = random_call(40)
    mx.eval(experts.resident().experts(3, x, ids, weights))
    assert len(calls) == 3
    assert not any(options.get("sorted_indices") for options in calls)


@pytest.mark.parametrize("P", [1, 7, 8, 9])
def test_stock_operations_get_eight_rows_on_a_gpu(P, monkeypatch):
    """MLX takes another kernel for fewer on CUDA."""
    bank, real, rows = random_experts().bank(3), mx.gather_qmm, []

    def product(x, *args, **options):
        rows.append(x.shape[0])
        return real(x, *args, **options)

    monkeypatch.setattr(mx, "gather_qmm", product)
    x, slots = random_call(P)[0], mx.array(np.arange(P, dtype=np.uint32)[::-1] % 7)
    alone = expert_ffn(x, slots, bank)
    monkeypatch.setattr(mx, "default_device", lambda: SimpleNamespace(type=mx.gpu))
    padded = expert_ffn(x, slots, bank)
    assert rows == [P] * 3 + [max(P, 8)] * 3
    assert np.isfinite(np.array(padded)).all()
    assert mx.array_equal(padded, alone).item()

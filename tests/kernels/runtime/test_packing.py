"""Oracle: the same launch, or the same model, whose arrays lie apart: the same bits."""

from __future__ import annotations

import copy
import gc
import random

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten, tree_map

from mlx_moeflux.kernels.runtime import packing
from mlx_moeflux.kernels.runtime.packing import PLACES, Arranger, Packing
from mlx_moeflux.loading import BUNDLED_MODEL, load_model
from tests.kernels.harness import emulated, require, scratch_kernel
from tests.kernels.metal import lint
from tests.kernels.metal.emulator import Emulator


def bits(array: mx.array) -> bytes:
    return bytes(memoryview(mx.contiguous(array).view(mx.uint8)))


LIKE = [
    ((3, 5), mx.float32),
    ((1,), mx.bfloat16),
    ((7, 33), mx.uint32),
    ((65,), mx.float16),
    ((2, 3, 4), mx.bfloat16),
]


def random_arrays() -> list[mx.array]:
    floats = [mx.random.normal(shape).astype(dtype) for shape, dtype in LIKE]
    floats[2] = mx.random.randint(0, 2**31 - 1, LIKE[2][0]).astype(mx.uint32)
    return floats


def test_views_hold_what_was_packed():
    arrays = random_arrays()
    packed = Packing.of(arrays)
    for array, view, start in zip(arrays, packed.arrays, packed.starts, strict=True):
        assert (view.shape, view.dtype) == (array.shape, array.dtype)
        assert bits(view) == bits(array)
        assert start % packing.ALIGNED == 0
        raw = memoryview(packed.buffer).cast("B")[start : start + array.nbytes]
        assert bytes(raw) == bits(array)
    assert packed.buffer.nbytes == packing.packed_bytes(LIKE)


def test_places_are_forgotten_with_the_packing():
    gc.collect()
    before = len(PLACES)
    packed = Packing.of(random_arrays())
    kept = packed.arrays[0]
    assert len(PLACES) == before + len(LIKE)
    assert copy.deepcopy(packed) is None
    del packed
    gc.collect()
    assert len(PLACES) == before
    assert np.isfinite(np.array(kept)).all()


KERNEL = scratch_kernel(
    "packed_sum",
    inputs=("x", "a", "b", "c", "d"),
    outputs=("y",),
    body="""
        uint i = thread_position_in_grid.x;
        y[i] = x[i] + float(a[i]) + 2.0f * float(b[i]) + 4.0f * float(c[i]) + 8.0f * float(d[i]) +
            float(b_shape[0]);
    """,
)


def call(x: mx.array, *others: mx.array) -> mx.array:
    return KERNEL(
        *(x, *others),
        grid=(32, 1, 1),
        threadgroup=(32, 1, 1),
        output_shapes=[(32,)],
        output_dtypes=[mx.float32],
    )[0]


@pytest.mark.usefixtures("device")
def test_a_launch_takes_the_buffer():
    dtypes = mx.float32, mx.bfloat16, mx.float16, mx.float32
    arrays = [
        mx.random.normal((n, 2)).astype(d) for n, d in zip((16, 20, 17, 16), dtypes, strict=True)
    ]
    x = mx.random.normal((32,))
    apart = call(x, *arrays)
    packed, other = Packing.of(arrays[:3]), Packing.of([arrays[3]])
    inputs = [x, *packed.arrays, *other.arrays]
    assert bits(call(*inputs)) == bits(apart)
    arrangement, taken = Arranger(KERNEL.inputs, {"b": True})(inputs)
    assert [id(a) for a in taken] == [id(x), id(packed.buffer), id(inputs[4])]
    assert arrangement.template["b_rows"] == 20
    # A body that reads more of a shape than its first axis keeps the array.
    _, taken = Arranger(KERNEL.inputs, {"b": False})(inputs)
    assert [id(a) for a in taken] == [id(x), id(packed.buffer), id(inputs[2]), id(inputs[4])]
    # An array given twice is passed once, but for those whose shape is read.
    twice = [x, *packed.arrays[:2], x, x]
    arranger = Arranger(KERNEL.inputs, {})
    assert len(arranger(twice)[1]) == 2
    assert len(arranger([x, *packed.arrays[:2], x, arrays[3]])[1]) == 3
    assert bits(call(*twice)) == bits(call(x, *arrays[:2], x, x))
    alone = [x, *arrays[:2], x, x]
    assert [id(a) for a in arranger(alone)[1]] == [id(a) for a in alone[:3]]
    shaped = Arranger(KERNEL.inputs, {"x": True, "c": True})
    assert [id(a) for a in shaped(alone)[1]] == [id(a) for a in (*alone[:3], x)]
    assert arranger([x, *arrays]) is None
    assert bits(call(*alone)) == bits(call(x, *arrays[:2], mx.array(x), mx.array(x)))


def by_rows(arrays: list[mx.array]) -> Packing:
    """What a bank does: a buffer, filled through its storage."""
    like = [(a.shape, a.dtype) for a in arrays]
    buffer = mx.zeros(packing.by_rows(like), mx.uint32)
    mx.eval(buffer)
    packed = Packing(buffer, like)
    whole = memoryview(buffer).cast("B")
    for array, start in zip(arrays, packed.starts, strict=True):
        whole[start : start + array.nbytes] = bits(array)
    return packed


@pytest.mark.usefixtures("device")
def test_one_text_serves_any_number_of_rows():
    """Arrays by rows, whose places depend on how many there are."""
    gc.collect()
    dtypes = mx.float32, mx.bfloat16, mx.float16, mx.float32
    x, seen = mx.random.normal((32,)), set()
    for rows in (4, 5, 9):
        arrays = [
            mx.random.normal((rows, n)).astype(d)
            for n, d in zip((16, 8, 24, 12), dtypes, strict=True)
        ]
        packed = by_rows(arrays)
        inputs = [x, *packed.arrays]
        assert packed.starts == [0, rows * 64, rows * 80, rows * 128]
        assert bits(call(*inputs)) == bits(call(x, *arrays))
        arrangement, taken = Arranger(KERNEL.inputs, {"b": True})(inputs)
        assert [a.shape for a in taken] == [(32,), (rows, 44)]
        seen.add((arrangement.bindings, *arrangement.template.items()))
    assert len(seen) == 1
    # Rows that are no whole units, or not as many: they lie one after another as ever.
    assert packing.by_rows([((3, 8), mx.float32), ((3, 4), mx.bfloat16)]) is None
    assert packing.by_rows([((3, 8), mx.float32), ((2, 8), mx.float32)]) is None


@pytest.mark.slow
@pytest.mark.usefixtures("device")
def test_what_was_found_is_forgotten_when_a_packing_goes():
    """Another may get its ids."""
    x = mx.random.normal((32,))
    for _ in range(20):
        arrays = [mx.random.normal((32,)) for _ in range(random.randint(4, 6))]
        packed = Packing.of(arrays)
        some = random.sample(range(len(arrays)), 4)
        together = call(x, *(packed.arrays[i] for i in some))
        assert bits(together) == bits(call(x, *(arrays[i] for i in some)))
        del packed, together


def steps(model) -> list[np.ndarray]:
    cache = model.make_cache()
    calls = [model(mx.array([ids]), cache) for ids in ([5, 6, 7, 8, 9, 10], [9], [8])]
    return [np.array(y.astype(mx.float32)) for y in calls]


@pytest.mark.slow
def test_metal_would_take_the_texts():
    """Those of a prepared model's launches, with what finds the parameters in them."""
    require(lint.missing(), "MOEFLUX_REQUIRE_EMULATOR")
    seen = {}
    with (
        emulated(
            inspect=lambda variant: seen.setdefault(variant.kernel.name, variant),
            schedules=Emulator.FIRST,
        ),
        load_model(BUNDLED_MODEL, expert_memory="100%", fuse=True) as model,
    ):
        steps(model)
    packed = [v for v in seen.values() if any("packed" in name for name in v.kernel.inputs)]
    assert len(packed) >= 8
    for variant in packed:
        assert lint.problems(variant) == [], variant.kernel.name


@pytest.mark.slow
@pytest.mark.usefixtures("device_of_a_model")
def test_a_prepared_model_gives_the_same_bits():
    gc.collect()
    others = len(PLACES)
    with load_model(BUNDLED_MODEL, expert_memory="100%", fuse=False) as model:
        apart, before = steps(model), {n: bits(a) for n, a in tree_flatten(model.parameters())}
        model.prepare()
        assert {n: bits(a) for n, a in tree_flatten(model.parameters())} == before
        assert len(PLACES) > others + 10 * len(model.layers)
        together = steps(model)
        for a, b in zip(apart, together, strict=True):
            assert np.isfinite(a).all()
            assert np.array_equal(a, b)
    del model
    gc.collect()
    assert len(PLACES) <= others


def test_replaced_parameters_leave_nothing_behind(two_bundled_layers):
    gc.collect()
    others = len(PLACES)
    with load_model(two_bundled_layers, expert_memory="100%", fuse=True) as model:
        assert len(PLACES) > others
        before = steps(model)
        layer = model.layers[1]
        norm = {"input_layernorm": {"weight": mx.array(layer.input_layernorm.weight)}}
        model.update({"model": {"layers": [{}, norm]}})
        some = len(PLACES)
        assert some > others  # a part was replaced, the rest is where it was
        model.update(tree_map(mx.array, model.parameters()))
        gc.collect()
        assert len(PLACES) <= others
        # Matrices are no longer stacked: BLAS adds up a product in parts of other sizes.
        for a, b in zip(before, steps(model), strict=True):
            assert np.abs(a - b).max() <= 1e-5 * np.abs(a).max()

"""Oracle: the same launch on the whole arrays; addresses and bytes of memory."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import mlx.core as mx
import pytest

from mlx_moeflux.experts.streaming.bank import LayerBank
from mlx_moeflux.kernels.runtime import device, views
from mlx_moeflux.kernels.runtime.launcher import set_backend
from mlx_moeflux.kernels.runtime.packing import Packing
from mlx_moeflux.kernels.runtime.views import LEAST_ELEMENTS, MOST_ROWS, SHORTS, keep, short
from tests.experts.helpers import MIXED, random_experts
from tests.kernels.harness import emulated, require_emulator, scratch_kernel
from tests.kernels.metal.emulator import EmulatorError
from tests.kernels.metal.recording import Recorder

LARGE = (6, 5, LEAST_ELEMENTS // 16)


def address(array: mx.array) -> int:
    return device.address_of(device.bytes_of(array))


def large() -> mx.array:
    array = mx.random.normal(LARGE)
    mx.eval(array)
    return array


@pytest.mark.parametrize(
    ("shape", "axis", "expected"),
    [
        (LARGE, 0, (6, 1, 2)),
        (LARGE, 1, (1, 5, 2)),
        ((2, 3, 4000, 16), 2, (1, 1, 4000, 1)),
        ((40_000, 8, 64), 2, (1, 1, 64)),
        ((LEAST_ELEMENTS,), 0, (8,)),
    ],
)
def test_a_view_begins_where_its_array_does(shape, axis, expected):
    array = mx.zeros(shape)
    view = short(array, axis)
    assert view is not None
    assert view.shape == expected
    assert address(view) == address(array)
    assert memoryview(view).c_contiguous
    part = array[1:] if len(shape) > 1 else array
    again = short(part, axis)
    assert again is None or address(again) == address(part)


def test_small_arrays_have_no_views():
    assert short(mx.zeros(LEAST_ELEMENTS - 1)) is None


def test_a_view_dies_with_its_array():
    gc.collect()
    before, memory = len(SHORTS), mx.get_active_memory()
    array = large()
    keep([array, mx.zeros(3), array])
    assert len(SHORTS) == before + 1
    view = SHORTS[id(array)].view
    keep([array])
    assert SHORTS[id(array)].view is view
    del array, view
    assert len(SHORTS) == before
    assert mx.get_active_memory() < memory + 1000  # numbers of random keys


def test_a_packing_has_views_of_its_buffer_and_its_arrays():
    gc.collect()
    before, memory = len(SHORTS), mx.get_active_memory()
    packed = Packing.of([large(), mx.zeros(3), large()])
    assert len(SHORTS) == before + 3
    for array in (packed.buffer, packed.arrays[0], packed.arrays[2]):
        assert address(SHORTS[id(array)].view) == address(array)
    del packed, array
    gc.collect()
    assert len(SHORTS) == before
    assert mx.get_active_memory() < memory + 1000  # numbers of random keys


def test_banks_have_views_again_after_resize(monkeypatch):
    monkeypatch.setattr(views, "LEAST_ELEMENTS", 8)
    bank = LayerBank(random_experts(MIXED).layouts[3], 4)
    gc.collect()
    before, memory = len(SHORTS), mx.get_active_memory()
    for slots in (6, 4, 3, 4):
        bank.resize(slots)
        gc.collect()
        for array in bank.current.experts.flat:
            if array.size >= 8:
                assert address(SHORTS[id(array)].view) == address(array)
    assert len(SHORTS) == before
    assert mx.get_active_memory() < memory + 1000  # numbers of random keys


# ---- Launches

READS = {
    "nothing": "w[thread_position_in_grid.x]",
    "its first length": "w[thread_position_in_grid.x % w_shape[0]]",
    "another length": "w[thread_position_in_grid.x % w_shape[2]]",
    "all lengths": "w[thread_position_in_grid.x % sum_of(w_shape)]",
}
KERNELS = {
    what: scratch_kernel(
        f"short_{i}",
        inputs=("x", "w"),
        outputs=("y",),
        body=f"y[thread_position_in_grid.x] = x[thread_position_in_grid.x] + {read};",
    )
    for i, (what, read) in enumerate(READS.items())
}


@pytest.fixture
def passed() -> Iterator[list[tuple[int, ...]]]:
    """The shapes of what launches get."""

    class Passed(Recorder):
        def build(self, kernel):
            launch = super().build(kernel)

            def noted(*, inputs, **options):
                shapes.append(inputs[1].shape)
                return launch(inputs=inputs, **options)

            return noted

    shapes: list[tuple[int, ...]] = []
    recorder = Passed()
    before = set_backend(recorder)
    yield shapes
    set_backend(before)


def call(what: str, x: mx.array, w: mx.array) -> mx.array:
    size = {"grid": (64, 1, 1), "threadgroup": (64, 1, 1)}
    return KERNELS[what](x, w, **size, output_shapes=[(64,)], output_dtypes=[mx.float32])[0]


def test_launches_of_few_rows_get_views(passed):
    w = large()
    keep([w])
    few, many = mx.zeros((MOST_ROWS, 8)), mx.zeros((MOST_ROWS + 1, 8))
    for what in READS:
        call(what, few, w)
    call("nothing", many, w)
    other = large()
    call("nothing", few, other)
    assert passed == [(6, 1, 2), (6, 1, 2), LARGE, LARGE, LARGE, LARGE]
    views.bind([other], [short(other)], any_rows=True)
    call("nothing", many, other)
    assert passed[-1] == (6, 1, 2)


def test_launches_elsewhere_get_arrays(passed):
    w = large()
    keep([w])
    device.backend().pads_inputs = False
    call("nothing", mx.zeros((1, 64)), w)
    assert passed == [LARGE]


def test_a_kernel_may_read_the_whole_array_and_nothing_behind_it():
    require_emulator()
    x, w = mx.random.normal((64,)), large()
    body = "uint i = thread_position_in_grid.x; y[i] = x[i] + w[i + {0}];"
    size = {"grid": (64, 1, 1), "threadgroup": (64, 1, 1)}
    results = []
    for kept in (False, True):
        for first, fits in ((w.size - 64, True), (w.size - 63, False)):
            kernel = scratch_kernel(
                f"end_{first}_{kept}", inputs=("x", "w"), outputs=("y",), body=body.format(first)
            )
            with emulated():
                launch = {"output_shapes": [(64,)], "output_dtypes": [mx.float32], **size}
                if fits:
                    results += kernel(x, w, **launch)
                else:
                    with pytest.raises(EmulatorError, match=rf"reads 'w'\[{w.size}\]"):
                        kernel(x, w, **launch)
        keep([w])
    assert mx.array_equal(*results).item()


def test_a_view_elsewhere_is_found():
    require_emulator()
    x, w = mx.random.normal((1, 64)), large()
    views.bind([w], [mx.zeros((6, 1, 2))])
    with emulated(), pytest.raises(EmulatorError, match="does not begin where its array does"):
        call("nothing", x, w)

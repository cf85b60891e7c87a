"""Oracle: bytes written through the views must be what MLX computes with."""

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.experts.io.readers import make_reader
from mlx_moeflux.experts.streaming.bank import LayerBank
from mlx_moeflux.experts.streaming.slots import EMPTY, SlotTable
from mlx_moeflux.experts.streaming.store import StreamedStore
from tests.experts.helpers import LAYERS, MIXED, random_experts, write_experts


@pytest.fixture
def experts():
    return random_experts(MIXED)


def fill(bank, slot, block):
    position = 0
    for view in bank.slot_views(slot):
        view[:] = block[position : position + view.nbytes]
        position += view.nbytes


def content(bank, slot):
    return b"".join(bytes(memoryview(array[slot])) for array in bank.arrays.values())


def test_a_slot_is_filled_without_a_copy(experts):
    bank = LayerBank(experts.layouts[3], 4)
    assert bank.nbytes == 4 * experts.layouts[3].nbytes
    assert sum(a.nbytes for a in bank.arrays.values()) == bank.nbytes
    arrays = dict(bank.arrays)
    fill(bank, 2, experts.block(3, 5))
    fill(bank, 0, experts.block(3, 1))
    assert content(bank, 2) == experts.block(3, 5)
    for name, array in bank.arrays.items():
        assert array is arrays[name]
        assert mx.array_equal(array[0], experts.arrays[3][name][1])
        assert not np.array(array[1].view(mx.uint8)).any()
    used = bank.current.experts.take(mx.array([2], mx.uint32), mx.float32)
    expected = experts.arrays[3]["down_proj.scales"][5].astype(mx.float32)
    assert mx.array_equal(used.down.scales[0], expected)
    assert used.down.spec == experts.layouts[3].specs["down_proj"]


def test_resize_keeps_contents_and_leaves_old_arrays_alone(experts):
    bank = LayerBank(experts.layouts[3], 3)
    for slot in range(3):
        fill(bank, slot, experts.block(3, slot))
    lazy = bank.arrays["up_proj.weight"].astype(mx.float32) + 0
    bank.resize(5)
    assert [content(bank, s) for s in range(3)] == [experts.block(3, s) for s in range(3)]
    fill(bank, 0, experts.block(3, 6))
    bank.resize(2, {4: 0, 0: 1})
    assert content(bank, 1) == experts.block(3, 6)
    assert not any(content(bank, 0))
    fill(bank, 0, experts.block(3, 4))
    assert content(bank, 0) == experts.block(3, 4)
    before = experts.arrays[3]["up_proj.weight"][:3].astype(mx.float32)
    assert mx.array_equal(lazy, before)


def test_bank_of_layers(experts, tmp_path):
    experts = write_experts(tmp_path, experts, "packed")
    with StreamedStore(make_reader("pread", experts.refs), {3: 2, 5: 4}) as store:
        sizes = [experts.layouts[layer].nbytes for layer in LAYERS]
        assert store.bank_bytes == 2 * sizes[0] + 4 * sizes[1]
        store.resize(3, 6)
        assert store.bank_bytes == 6 * sizes[0] + 4 * sizes[1]
        assert store.slots == {3: 6, 5: 4}


def test_slot_table_moves_what_is_cut_off():
    table = SlotTable(5, 9)
    for expert in (8, 2, 5, 0):
        table.put(expert, table.take())
    assert table.slot_of == {8: 0, 2: 1, 5: 2, 0: 3}
    assert table.remove(2) == 1
    assert table.resize(3) == {0: 0, 2: 2, 3: 1}
    assert table.slot_of == {8: 0, 0: 1, 5: 2}
    assert (table.free, table.complete) == (0, False)
    assert [table.slots_by_expert[e] for e in (8, 0, 5)] == [0, 1, 2]
    assert table.resize(4) == {0: 0, 1: 1, 2: 2}
    assert (table.take(), table.expert_of[3]) == (3, EMPTY)
    table.rebuild()
    assert table.free == 1

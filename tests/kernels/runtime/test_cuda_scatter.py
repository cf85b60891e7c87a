"""Oracle: NumPy's slices. The kernel runs on the host; banks on a GPU are in
tests/experts/streaming/test_gpu.py."""

import ctypes

import numpy as np
import pytest

from mlx_moeflux.kernels.runtime.cuda.upload import MOST_PIECES, Pieces, launches
from tests.kernels.runtime.scatter_on_host import launcher, library

CHUNK = 16384
# Shorter than a word, than a chunk, and longer; multiples of 16 and not.
LENGTHS = (1, 7, 16, 513, 4096, CHUNK - 1, CHUNK, CHUNK + 4, 3 * CHUNK + 250)


def aligned(nbytes, fill=None):
    """Bytes that begin at a multiple of 16."""
    memory = np.zeros(nbytes + 16, np.uint8)
    view = memory[-memory.ctypes.data % 16 :][:nbytes]
    view[:] = fill if fill is not None else 0
    return view


def run(pieces, geometry):
    for argument in launches(pieces):
        launcher()(argument, *geometry)


@pytest.mark.parametrize("geometry", [(1, 1), (3, 8), (32, 256)], ids=str)
@pytest.mark.parametrize("unit", [1, 2, 4, 8, 16])
def test_pieces_go_where_they_belong(unit, geometry):
    random = np.random.default_rng(unit)
    source = aligned(1 << 19, random.integers(0, 256, 1 << 19))
    target = aligned(1 << 19, random.integers(0, 256, 1 << 19))
    expected, position, pieces = target.copy(), 0, []
    for nbytes in random.permutation(LENGTHS * 3).tolist():
        position += unit * int(random.integers(0, 9))
        begin = unit * int(random.integers(0, (len(source) - nbytes) // unit))
        expected[position : position + nbytes] = source[begin : begin + nbytes]
        pieces.append((target.ctypes.data + position, source.ctypes.data + begin, nbytes))
        position += -(-nbytes // unit) * unit
    assert position < len(target)
    run(pieces, geometry)
    assert np.array_equal(target, expected)


def test_words_are_as_wide_as_addresses_allow():
    found, source, target = library(), aligned(CHUNK), aligned(CHUNK)
    wide, misplaced = (ctypes.c_long.in_dll(found, name) for name in ("wide_words", "misplaced"))
    for shift, nbytes, words in ((0, 1024, 64), (8, 1024, 128), (0, 1030, 64), (4, 1024, 0)):
        before = wide.value
        run([(target.ctypes.data + 16, source.ctypes.data + shift, nbytes)], (2, 32))
        # A word goes through a register.
        assert wide.value - before == 2 * words
    assert misplaced.value == 0


def test_many_pieces_take_several_launches():
    source, target = aligned(1000, np.arange(1000) % 251), aligned(1000)
    to, start = target.ctypes.data, source.ctypes.data
    pieces = [(to + 999 - i, start + i, 1) for i in range(1000)]
    counts = [argument.count for argument in launches(pieces)]
    assert counts == [MOST_PIECES] * (1000 // MOST_PIECES) + [1000 % MOST_PIECES]
    run(pieces, (2, 4))
    assert np.array_equal(target, source[::-1])
    assert launches([]) == []


def test_the_host_declares_what_the_kernel_takes():
    # What a kernel's arguments may take on every GPU.
    assert library().size_of_pieces() == ctypes.sizeof(Pieces) <= 4096

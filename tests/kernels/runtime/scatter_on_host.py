"""The kernel of ``scatter.cu``, compiled for the host."""

from __future__ import annotations

import ctypes
import functools
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from mlx_moeflux.kernels.runtime.cuda.upload import SOURCES, Pieces

# Threads run one after another. Wide words look whether they lie where CUDA wants them, and count.
_SHIM = """
#include <cstdint>
#include <cstring>
#define __global__
#define __device__ static
#define __grid_constant__
struct Index { unsigned x; };
static Index blockIdx, threadIdx, gridDim, blockDim;
extern "C" { long wide_words, misplaced; unsigned long size_of_pieces(); }
template <int N> struct alignas(N) Wide {
  unsigned char bytes[N];
  Wide() = default;
  Wide& operator=(const Wide& other) {
    misplaced += (uintptr_t)this % N != 0 || (uintptr_t)&other % N != 0;
    wide_words++;
    memcpy((void*)this, (const void*)&other, N);
    return *this;
  }
};
typedef Wide<16> uint4;
typedef Wide<8> uint2;
#define LOAD(at) (*(at))
SCATTER
extern "C" void launch(const Pieces* pieces, unsigned blocks, unsigned threads) {
  gridDim.x = blocks;
  blockDim.x = threads;
  for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++)
    for (threadIdx.x = 0; threadIdx.x < threads; threadIdx.x++) scatter(*pieces);
}
unsigned long size_of_pieces() { return sizeof(Pieces); }
"""


@functools.cache
def library() -> ctypes.CDLL:
    """Return it; skips the test where there is no g++."""
    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder) / "scatter.cpp", Path(folder) / "scatter.so"
        source.write_text(_SHIM.replace("SCATTER", "".join(f.read_text() for f in SOURCES)))
        flags = "-O1", "-shared", "-fPIC", "-Wno-unknown-pragmas"
        try:
            subprocess.run(["g++", *flags, "-o", made, source], check=True)
        except FileNotFoundError:
            pytest.skip("needs g++")
        return ctypes.CDLL(str(made))


def launcher() -> Callable[[Pieces, int, int], None]:
    """Return a function that runs the kernel for pieces, blocks and threads of each."""
    found = library()
    return lambda pieces, blocks, threads: found.launch(ctypes.byref(pieces), blocks, threads)

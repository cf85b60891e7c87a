"""The kernel of ``handshake.cuh``, compiled for the host: every thread of CUDA is one of the
host's."""

from __future__ import annotations

import ctypes
import functools
import subprocess
import tempfile
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from mlx_moeflux.kernels.runtime.cuda.handshake import SOURCES

BLOCKS, THREADS = 3, 32
# Each block has a namespace, and with it shared variables of its own.
_SHIM = """
#include <atomic>
#include <barrier>
#include <chrono>
#include <cstring>
#include <sched.h>
#include <thread>
#include <vector>
#define __device__ static
#define __shared__ static
struct Index { unsigned x; };
static thread_local Index threadIdx, blockIdx;
static Index gridDim{BLOCKS}, blockDim{THREADS};
static std::barrier<> gates[BLOCKS] = {std::barrier<>(THREADS), std::barrier<>(THREADS),
                                       std::barrier<>(THREADS)};
#define __syncthreads() gates[blockIdx.x].arrive_and_wait()
#define __threadfence_system() std::atomic_thread_fence(std::memory_order_seq_cst)
template <int N> struct alignas(N) Wide { unsigned char bytes[N]; };
typedef Wide<16> uint4;
typedef Wide<8> uint2;
#define LOAD(at) (*(at))
static unsigned long long nanoseconds() {
  sched_yield();
  return std::chrono::steady_clock::now().time_since_epoch().count();
}
COPY
namespace first {
KERNEL
}
namespace second {
KERNEL
}
namespace third {
KERNEL
}
template <int K> static void run(const unsigned* ids, u64* control, unsigned* slots) {
  std::vector<std::thread> threads;
  for (unsigned block = 0; block < BLOCKS; block++)
    for (unsigned thread = 0; thread < THREADS; thread++)
      threads.emplace_back([=] {
        threadIdx.x = thread;
        blockIdx.x = block;
        if (block == 0) first::pull<K>(ids, control, slots);
        else if (block == 1) second::pull<K>(ids, control, slots);
        else third::pull<K>(ids, control, slots);
      });
  for (auto& thread : threads) thread.join();
}
extern "C" void launch(int k, const unsigned* ids, u64* control, unsigned* slots) {
  if (k == 3) run<3>(ids, control, slots);
  if (k == 4) run<4>(ids, control, slots);
}
"""


@functools.cache
def library() -> ctypes.CDLL:
    """Return it; skips the test where there is no g++."""
    copy, kernel = (file.read_text() for file in SOURCES)
    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder) / "handshake.cpp", Path(folder) / "handshake.so"
        source.write_text(_SHIM.replace("COPY", copy).replace("KERNEL", kernel))
        flags = "-O0", "-std=c++20", "-shared", "-fPIC", "-pthread", "-Wno-unknown-pragmas"
        sizes = f"-DBLOCKS={BLOCKS}", f"-DTHREADS={THREADS}"
        try:
            subprocess.run(["g++", *flags, *sizes, "-o", made, source], check=True)
        except FileNotFoundError:
            pytest.skip("needs g++")
        return ctypes.CDLL(str(made))


class HostPull:
    """Stands for :class:`~mlx_moeflux.kernels.runtime.cuda.handshake.Pull`; calls are evaluated at
    once."""

    copies = True

    def __init__(self, k, locked):
        self.k, self.locked, self._launch = k, locked, library().launch

    def control(self, common, box, limit):
        words = np.zeros(3 + 32, np.uint64)
        words[:3] = common, box, limit
        return words

    def slots(self, ids, control):
        chosen, slots = np.array(ids), np.full(self.k, 99, np.uint32)
        arrays = (array.ctypes.data_as(ctypes.c_void_p) for array in (chosen, control, slots))
        self._launch(self.k, *arrays)
        return mx.array(slots[None])

    def finish(self):
        pass

"""The kernel of ``handshake.metal``, compiled for the host: every thread of Metal is one of the
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

from mlx_moeflux.kernels.runtime.metal.handshake import Pull, text

MOST = 31
_SHIM = """
#include <atomic>
#include <barrier>
#include <sched.h>
#include <thread>
#include <vector>
#define device
#define constant const
#define coherent(scope)
typedef unsigned uint;
struct mem_flags { enum { mem_none, mem_device }; };
namespace metal {
enum thread_scope { thread_scope_thread };
enum fence_order { memory_order_seq_cst };
static void atomic_thread_fence(int, fence_order, thread_scope) {
  std::atomic_thread_fence(std::memory_order_seq_cst);
  sched_yield();
}
}
static std::barrier<>* gate;
static void threadgroup_barrier(int) { gate->arrive_and_wait(); }
HEADER
struct Index { uint x; };
static void body(const uint* ids, const uint* words, const uint* control, uint* slots,
                 Index thread_position_in_grid) {
BODY
}
extern "C" void launch(uint k, const uint* ids, const uint* words, const uint* control,
                       uint* slots) {
  std::barrier<> all(k);
  gate = &all;
  std::vector<std::thread> threads;
  for (uint i = 0; i < k; i++) threads.emplace_back(body, ids, words, control, slots, Index{i});
  for (auto& thread : threads) thread.join();
}
"""


@functools.cache
def library() -> ctypes.CDLL:
    """Return it; skips the test where there is no g++."""
    header, body = text()
    with tempfile.TemporaryDirectory() as folder:
        source, made = Path(folder) / "handshake.cpp", Path(folder) / "handshake.so"
        source.write_text(_SHIM.replace("HEADER", header).replace("BODY", body))
        flags = "-O1", "-std=c++20", "-shared", "-fPIC", "-pthread", "-Wno-unknown-pragmas"
        try:
            subprocess.run(["g++", *flags, "-o", made, source], check=True)
        except FileNotFoundError:
            pytest.skip("needs g++")
        return ctypes.CDLL(str(made))


class HostPull(Pull):
    """The package's own, whose calls are evaluated at once, on the host."""

    def __init__(self, k):
        super().__init__(k)
        self._launch = self._on_host

    def _on_host(self, inputs, grid, threadgroup, output_shapes, output_dtypes):
        assert (grid, output_dtypes) == (threadgroup, [mx.uint32])
        arrays = [np.array(array, copy=None) for array in inputs]
        arrays.append(np.full(output_shapes[0], 99, np.uint32))
        pointers = (array.ctypes.data_as(ctypes.c_void_p) for array in arrays)
        library().launch(grid[0], *pointers)
        return [mx.array(arrays[-1])]

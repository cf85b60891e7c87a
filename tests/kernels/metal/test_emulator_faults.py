"""Oracle: faults planted on purpose: each must be found and named."""

from __future__ import annotations

import re

import mlx.core as mx
import numpy as np
import pytest

from tests.kernels.harness import emulated
from tests.kernels.metal.emulator import EmulatorError
from tests.kernels.metal.test_emulator import launch, one

S = "threadgroup float s[64]; uint i = thread_index_in_threadgroup; "
COUNTER = S.replace("float", "atomic_uint")
BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup); "
FAULTS = {
    "write past an output": ("uint i = thread_position_in_grid.x; y[i + 1] = x[i];",
                             r"writes 'y'\[64\], which has 64 elements"),
    "write before an output": ("uint i = thread_position_in_grid.x; y[int(i) - 1] = x[i];",
                               r"writes 'y'\[-1\]"),
    "read past an input": ("uint i = thread_position_in_grid.x; y[i] = x[i + 1];",
                           r"reads 'x'\[64\]"),
    "shape of an axis that is not there": (
        "uint i = thread_position_in_grid.x; y[i] = x[i] + x_shape[1];", r"reads 'x_shape'\[1\]"),
    "pack past an input": ("uint i = thread_position_in_grid.x; y[i] = load_pack<4>(x + i - i % 4"
                           " + 4).at[0];", r"reads 'x'\[6[47]\]"),  # GCC reads one number, or four
    "pack at an odd place": ("uint i = thread_position_in_grid.x; y[i] = i < 32 ? "
                             "load_pack<4>(x + i).at[0] : 0.0f;", "no multiple of its size"),
    "write into an input": ("uint i = thread_position_in_grid.x; ((device float*)x)[i] = y[i] = 1;",
                            "is an input"),
    "past a threadgroup array": (
        S + "threadgroup float* p = s; p[i + 1] = 1; y[i] = 0;",
        r"writes 's'\[64\]",
    ),
    "past an array's bounds": (
        S + "float own[4] = {1, 2, 3, 4}; s[i] = 1; y[i] = own[i / 15];",
        "index 4 in line [0-9]+ is out of its array's bounds",
    ),
    "output left out": ("uint i = thread_position_in_grid.x; if (i != 5) y[i] = x[i];",
                        r"'y'\[5\] is never written"),
    "one output by two threads": ("uint i = thread_position_in_grid.x; y[i / 2] = y[i] = x[i];",
                                  "no barrier lies between"),
    "one output by two threadgroups": ("y[thread_index_in_threadgroup] = 1;",
                                       "another threadgroup"),
    "no barrier before reading": (S + "s[i] = x[i]; y[i] = s[63 - i];", "no barrier lies between"),
    "no barrier before writing": (
        S + "s[i] = x[i]; " + BARRIER + "float v = s[63 - i]; s[i] = v; y[i] = v;",
        "no barrier lies between"),
    "a simdgroup barrier for two simdgroups": (
        S + "s[i] = x[i]; simdgroup_barrier(mem_flags::mem_threadgroup); y[i] = s[63 - i];",
        "no barrier lies between"),
    "a barrier of other memory": (
        S + "s[i] = x[i]; threadgroup_barrier(mem_flags::mem_device); y[i] = s[63 - i];",
        "no barrier lies between"),
    "a barrier that some miss": (S + "if (i < 32) { " + BARRIER + "} y[i] = x[i];",
                                 "threads that do not come"),
    "barriers at different places": (S + "if (i < 32) { " + BARRIER + "\n} else {\n" + BARRIER +
                                     "\n} y[i] = x[i];", "different places"),
    "a simdgroup operation that some miss": (
        S + "if (i & 1) { y[i] = simd_sum(x[i]); } else { y[i] = 0; }", "threads that do not come"),
    "a counter read without a barrier": (
        COUNTER + "atomic_fetch_add_explicit(s + 5, 1, memory_order_relaxed); "
        "y[i] = atomic_load_explicit(s + 5, memory_order_relaxed);",
        "no barrier lies between"),
    "a counter set without a barrier": (
        COUNTER + "atomic_fetch_add_explicit(s + i % 7, 1, memory_order_relaxed); "
        "atomic_store_explicit(s + i, 0, memory_order_relaxed); y[i] = 0;",
        "no barrier lies between"),
    "counted before it is set": (
        COUNTER + "atomic_store_explicit(s + i, 0, memory_order_relaxed); "
        "atomic_fetch_add_explicit(s + 63 - i, 1, memory_order_relaxed); y[i] = 0;",
        "no barrier lies between"),
    "past the counters": (
        COUNTER + "atomic_fetch_add_explicit(s + 1 + i, 1, memory_order_relaxed); y[i] = 0;",
        r"writes 's'\[64\]"),
    "what a counter was, by the order of threads": (
        COUNTER + "atomic_store_explicit(s + i, 0, memory_order_relaxed); " + BARRIER +
        "y[i] = atomic_fetch_add_explicit(s, 1, memory_order_relaxed);",
        "depends on the order of threads"),
    "rows of a tile at odd places": (
        S + "s[i] = x[i]; tile_a<float> a; load_a(a, s + 1, 4, i & 31); y[i] = a[0];",
        "multiples of 16"),
    "too much threadgroup memory": ("threadgroup float s[8193]; uint i = "
                                    "thread_index_in_threadgroup; s[i] = 1; y[i] = x[i];",
                                    "Metal has 32768"),
    "memory read before it is written": (S + "if (i == 0) s[0] = 1; " + BARRIER + "y[i] = s[i];",
                                         None),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_found(fault):
    body, message = FAULTS[fault]
    kernel = one(re.sub(r"\W+", "_", fault), body)
    groups = 2 if fault.endswith("threadgroups") else 1
    with emulated():
        if message is None:
            (y,) = launch(kernel, mx.random.normal((64,)))
            assert np.isnan(np.array(y)[1:]).all()
            return
        with pytest.raises(EmulatorError, match=message) as caught:
            launch(kernel, mx.random.normal((64,)), groups=groups)
    assert kernel.name in str(caught.value)


def test_order_of_threads_shows():
    """Two threadgroups that add to one place would: here a schedule-dependent value."""
    kernel = one(
        "order",
        """
        threadgroup float s[64];
        uint i = thread_index_in_threadgroup;
        s[i] = x[i];
        simdgroup_barrier(mem_flags::mem_threadgroup);
        y[i] = s[i ^ 1];
        """,
    )
    x = mx.random.normal((64,))
    with emulated(schedules=[("forward", 0), ("reverse", 0), *(("random", s) for s in range(4))]):
        (y,) = launch(kernel, x)
    assert (y == x.reshape(32, 2)[:, ::-1].reshape(-1)).all()


def test_partly_written_outputs_may_be_declared():
    body = "uint i = thread_position_in_grid.x; if (i < 60) { y[i] = x[i]; }"
    kernel = one("partly", body)
    x = mx.random.normal((64,))
    with emulated(partly_written=["y"]):
        (y,) = launch(kernel, x)
    assert (y[:60] == x[:60]).all()
    assert mx.isnan(y[60:]).all()

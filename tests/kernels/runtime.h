// What the language header and the runtime of the emulator share.
#pragma once
#include <stddef.h>
#include <stdint.h>

struct emu_uint3 {
  unsigned x, y, z;
};

// The thread that runs now.
struct emu_thread {
  emu_uint3 in_grid, in_threadgroup, threadgroup, threads, threadgroups;
  unsigned index;
};

extern "C" {
extern emu_thread* emu_now;

// Waits for every thread of the threadgroup. `site` tells call sites apart.
void emu_threadgroup_barrier(int flags, int site);
// Waits for every lane of the simdgroup.
void emu_simdgroup_barrier(int flags, int site);
// Hands `bytes` (at most 16) to the other lanes and returns 32 slots of 16 bytes, one a lane,
// valid until the lane's next collective operation.
const unsigned char* emu_exchange(const void* value, size_t bytes, int site);
// The threadgroup array declared at `site`: the same one for every thread.
void* emu_threadgroup_array(const char* name, size_t bytes, size_t item, int real, int site);
// A tile's rows must start at multiples of 16 bytes.
void emu_check_rows(const void* p, long row_bytes);
}

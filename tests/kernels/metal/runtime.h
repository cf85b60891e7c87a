// What the language header, the runtime and Python share.
#pragma once
#include <stddef.h>
#include <stdint.h>

struct emu_uint3 {
  unsigned x, y, z;
};

// The thread that runs now.
struct emu_thread {
  emu_uint3 in_grid, in_group, group, threads, groups, grid;
  unsigned index;
};

// One array of a launch. Outputs come back in `data`; `unwritten` is the index of their first
// element that nobody wrote, or -1.
struct emu_buffer {
  const char* name;
  void* data;
  int64_t bytes;
  int32_t item, output;
  int64_t unwritten;
};

// A kernel's library: one thread's work, and where the library lies.
struct emu_program {
  void (*work)(void** buffers, const emu_thread* now);
  const char *begin, *end;
};

extern "C" {
// Runs the kernel over the grid. order: 0 forward, 1 reverse, 2 random. Returns 0, or 1 with one
// sentence in `message`.
int emu_launch(
    const emu_program* program, emu_buffer* buffers, int count, const unsigned* grid,
    const unsigned* group, int order, unsigned seed, char* message, int message_bytes);

unsigned emu_lane(void);
// Waits for every thread of the threadgroup. `site` tells call sites apart.
void emu_threadgroup_barrier(int flags, int site);
// Waits for every lane of the simdgroup.
void emu_simdgroup_barrier(int flags, int site);
// Hands `bytes` (at most 16) to the other lanes and returns 32 slots of 16 bytes, one a lane,
// valid until the lane's next collective operation.
const unsigned char* emu_exchange(const void* value, size_t bytes, int site);
// *p += by; returns what *p was. Any threads may do so at once, and nothing else with *p.
unsigned emu_atomic_add(unsigned* p, unsigned by);
// c += a b for matrices of 8 x 8 of which a lane holds two neighbours of a row.
void emu_multiply_accumulate(float* c, const float* a, const float* b, int site);
// The threadgroup array declared at `site`: the same one for every thread.
void* emu_threadgroup_array(const char* name, size_t bytes, size_t item, int real, int site);
// A pack starts at a multiple of its size.
void emu_check_pack(const void* p, long bytes);
// A tile's rows must start at multiples of 16 bytes.
void emu_check_rows(const void* p, long row_bytes);
}

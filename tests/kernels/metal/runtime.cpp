// Runs a kernel on the CPU: a fibre for each thread of a threadgroup, one threadgroup after the
// other. The kernel is compiled with -fsanitize=thread but finds the hooks below, so that
// every access to memory is seen: it must lie in a buffer, be aligned, and be ordered by a barrier
// against every other thread's access to the same element.
#include "runtime.h"

#include "switch.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <algorithm>
#include <string>
#include <vector>

namespace {

const long STACK = 64 << 10, POISONED = 8 << 10, GAP = 1 << 20, LANES = 32, THREADGROUP_BYTES = 32 << 10;
// COUNTING: who adds to a counter; it belongs to no simdgroup.
const int NOBODY = -1, SEVERAL = -2, MANY = -3, COUNTING = -LANES;

// Who touched an element last, and when, counted in barriers.
struct Cell {
  int writer = NOBODY, reader = NOBODY;  // reader: a thread, or several of a simdgroup, or many
  int reader_simdgroup = 0;
  int write_epoch = 0, write_step = 0, read_epoch = 0, read_step = 0;
};

struct Region {
  std::string name;
  char* base;
  long bytes, item;
  bool writable, shared;  // shared: threadgroup memory
  std::vector<Cell> cells;
};

struct Fibre {
  void* sp;
  char* stack;
  emu_thread thread;
  bool done;
};

// What lanes wait at: a simdgroup's, or the whole threadgroup's.
struct Meeting {
  std::vector<int> waiting;
  const char* what = nullptr;
  int site = 0;
};

struct Simdgroup {
  Meeting meeting;
  int step[2] = {0, 0};  // barriers passed, for threadgroup and device memory
  unsigned parity = 0;
  alignas(16) unsigned char slots[2][LANES * 16];
};

std::vector<Region> regions;  // sorted by base
std::vector<Fibre> fibres;
std::vector<Simdgroup> simdgroups;
std::vector<int> ready;
std::vector<std::string> arrays;  // names of threadgroup arrays in the order of their regions
std::vector<void*> pointers;
Meeting everybody;
size_t ready_head, device_regions;
int current, threads, order, epoch[2], first_epoch, alive;
long shared_bytes;
char *arena, *arena_end, *stacks;  // kept for the next launch
long arena_bytes, stack_bytes;
struct {
  const char* base;
  long bytes;
} input;  // that was read last
emu_program kernel;
unsigned random_state;
void* caller;  // where the kernel accessed memory last
jmp_buf failed;
char* message;
int message_bytes;

unsigned next_random() {
  random_state ^= random_state << 13;
  random_state ^= random_state >> 17;
  random_state ^= random_state << 5;
  return random_state;
}

[[noreturn]] void fail(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  int n = vsnprintf(message, message_bytes, format, arguments);
  va_end(arguments);
  if (current >= 0 && n < message_bytes) {
    const emu_thread& t = fibres[current].thread;
    n += snprintf(
        message + n, message_bytes - n, " (thread %u, %u, %u of threadgroup %u, %u, %u)",
        t.in_group.x, t.in_group.y, t.in_group.z, t.group.x, t.group.y, t.group.z);
  }
  if (caller && n < message_bytes) {
    snprintf(message + n, message_bytes - n, "@%lx", long((char*)caller - kernel.begin));
  }
  longjmp(failed, 1);
}

// ---- Fibres

void* main_sp;

void to_main() {
  int me = current;
  current = -1;
  emu_switch(&fibres[me].sp, main_sp);
}

void entry() {
  kernel.work(pointers.data(), &fibres[current].thread);
  fibres[current].done = true;
  --alive;
  to_main();
  abort();
}

void start(Fibre& f) {
  char* top = f.stack + STACK;
  memset(top - POISONED, 0xff, POISONED);  // NaN in uninitialised private arrays
  f.sp = fresh_stack(top, entry);
  f.done = false;
}

void make_ready(std::vector<int>& who) {
  std::sort(who.begin(), who.end());
  if (order == 1) std::reverse(who.begin(), who.end());
  ready.insert(ready.end(), who.begin(), who.end());
  who.clear();
}

int take_ready() {
  if (order == 2) {
    size_t i = ready_head + next_random() % (ready.size() - ready_head);
    std::swap(ready[ready_head], ready[i]);
  }
  int next = ready[ready_head++];
  if (ready_head == ready.size()) ready.clear(), ready_head = 0;
  return next;
}

// The last to come goes on at once, the others when their turn comes.
bool meet(Meeting& m, size_t members, const char* what, int site) {
  if (m.waiting.empty()) {
    m.what = what, m.site = site;
  } else if (m.what != what || m.site != site) {
    fail(
        "threads that must meet are at different places: %s in line %d, %s in line %d", m.what,
        m.site, what, site);
  }
  if (m.waiting.size() + 1 < members) {
    m.waiting.push_back(current);
    return false;
  }
  make_ready(m.waiting);
  return true;
}

Simdgroup& own_simdgroup() { return simdgroups[current / LANES]; }

size_t lanes_here(const char* what, int site) {
  if (long(current / LANES + 1) * LANES > threads) {
    fail("%s in line %d: the threadgroup's %d threads are no whole simdgroups", what, site, threads);
  }
  return LANES;
}

#include "memory.h"

void reserve(char*& place, long& bytes, long wanted) {
  if (bytes >= wanted) return;
  if (place) munmap(place, bytes);
  void* p = mmap(
      nullptr, wanted, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  place = p == MAP_FAILED ? nullptr : (char*)p;
  bytes = place ? wanted : 0;
}

void run_threadgroup(const emu_uint3& at, const emu_uint3& group, const emu_uint3& grid) {
  simdgroups.assign((threads + LANES - 1) / LANES, Simdgroup());
  first_epoch = epoch[0] = epoch[1] = std::max(epoch[0], epoch[1]) + 1;
  everybody = Meeting();
  regions.resize(device_regions);
  shared_bytes = 0;
  arrays.clear();
  ready.clear();
  ready_head = 0;
  std::vector<int> all;
  for (int i = 0; i < threads; ++i) {
    emu_thread& t = fibres[i].thread;
    t.in_group = {i % group.x, i / group.x % group.y, i / group.x / group.y};
    t.group = at;
    t.in_grid = {
        at.x * group.x + t.in_group.x, at.y * group.y + t.in_group.y,
        at.z * group.z + t.in_group.z};
    t.threads = group;
    t.grid = grid;
    t.groups = {grid.x / group.x, grid.y / group.y, grid.z / group.z};
    t.index = i;
    start(fibres[i]);
    all.push_back(i);
  }
  alive = threads;
  make_ready(all);
  while (ready_head < ready.size()) {
    current = take_ready();
    emu_switch(&main_sp, fibres[current].sp);
  }
  current = -1;
  if (!alive) return;
  Meeting* stuck = &everybody;
  for (auto& s : simdgroups) {
    if (!s.meeting.waiting.empty()) stuck = &s.meeting;
  }
  current = stuck->waiting.empty() ? -1 : stuck->waiting[0];
  fail("%s in line %d waits for threads that do not come", stuck->what, stuck->site);
}

}  // namespace

extern "C" {

unsigned emu_lane(void) { return current % LANES; }

void emu_threadgroup_barrier(int flags, int site) {
  if (meet(everybody, threads, "threadgroup_barrier", site)) {
    if (flags & 2) ++epoch[0];
    if (flags & 1) ++epoch[1];
  } else {
    to_main();
  }
}

void emu_simdgroup_barrier(int flags, int site) {
  Simdgroup& s = own_simdgroup();
  if (meet(s.meeting, lanes_here("simdgroup_barrier", site), "simdgroup_barrier", site)) {
    if (flags & 2) ++s.step[0];
    if (flags & 1) ++s.step[1];
  } else {
    to_main();
  }
}

const unsigned char* emu_exchange(const void* value, size_t bytes, int site) {
  Simdgroup& s = own_simdgroup();
  const unsigned char* slots = s.slots[s.parity];
  memcpy(s.slots[s.parity] + 16 * (current % LANES), value, bytes);
  if (meet(s.meeting, lanes_here("a simdgroup operation", site), "a simdgroup operation", site)) {
    s.parity ^= 1;
  } else {
    to_main();
  }
  return slots;
}

unsigned emu_atomic_add(unsigned* p, unsigned by) {
  caller = __builtin_return_address(0);
  check_counter((char*)p);
  caller = nullptr;
  unsigned before = *p;
  *p += by;
  return before;
}

void emu_multiply_accumulate(float* c, const float* a, const float* b, int site) {
  float pair[4] = {a[0], a[1], b[0], b[1]};
  const float* all = (const float*)emu_exchange(pair, sizeof(pair), site);
  int lane = current % LANES;
  int row = ((lane >> 2) & 4) + ((lane >> 1) & 3), col = ((lane >> 1) & 4) + ((lane & 1) << 1);
  auto holder = [](int row, int col) {
    return (row & 4) << 2 | (col & 4) << 1 | (row & 3) << 1 | ((col >> 1) & 1);
  };
  for (int k = 0; k < 8; ++k) {
    float left = all[4 * holder(row, k) + (k & 1)];
    const float* right = all + 4 * holder(k, col) + 2;
    c[0] += left * right[0];
    c[1] += left * right[1];
  }
}

void* emu_threadgroup_array(const char* name, size_t bytes, size_t item, int real, int site) {
  std::string key = std::string(name) + ":" + std::to_string(site);
  for (size_t i = 0; i < arrays.size(); ++i) {
    if (arrays[i] == key) return regions[device_regions + i].base;
  }
  shared_bytes += bytes;
  if (shared_bytes > THREADGROUP_BYTES) {
    fail("threadgroup arrays take %ld bytes; Metal has %ld", shared_bytes, THREADGROUP_BYTES);
  }
  char* base = place_region(name, bytes, item, true, true);
  memset(base, real ? 0xff : 0xcd, bytes);
  arrays.push_back(key);
  return base;
}

void emu_check_pack(const void* p, long bytes) {
  caller = nullptr;
  const char* q = (const char*)p;
  if (q < arena || q >= arena_end) return;
  Region& r = *region_of(q);
  if ((q - r.base) % bytes) {
    fail(
        "a pack of %ld bytes lies at byte %ld of '%s', which is no multiple of its size", bytes,
        long(q - r.base), r.name.c_str());
  }
}

void emu_check_rows(const void* p, long row_bytes) {
  const char* q = (const char*)p;
  if (q < arena || q >= arena_end) return;
  Region& r = *region_of(q);
  if ((q - r.base) % 16 || row_bytes % 16) {
    fail(
        "a tile is loaded from '%s' at byte %ld with rows of %ld bytes; both must be multiples "
        "of 16",
        r.name.c_str(), long(q - r.base), row_bytes);
  }
}

int emu_launch(
    const emu_program* program, emu_buffer* buffers, int count, const unsigned* grid,
    const unsigned* group, int order_, unsigned seed, char* message_, int message_bytes_) {
  kernel = *program, message = message_, message_bytes = message_bytes_;
  caller = nullptr, order = order_, random_state = seed * 2654435761u | 1u, current = -1;
  emu_uint3 threads_in_grid = {grid[0], grid[1], grid[2]};
  emu_uint3 in_group = {group[0], group[1], group[2]};
  threads = group[0] * group[1] * group[2];
  long total = 32 * (GAP + THREADGROUP_BYTES);
  for (int i = 0; i < count; ++i) total += buffers[i].bytes + 4096 + GAP;
  reserve(arena, arena_bytes, total);
  reserve(stacks, stack_bytes, threads * STACK);
  int status = 1;
  if (!arena || !stacks) {
    snprintf(message, message_bytes, "no memory for the emulator");
  } else if (setjmp(failed) == 0) {
    arena_end = arena + total;
    fibres.assign(threads, Fibre());
    for (int i = 0; i < threads; ++i) fibres[i].stack = stacks + i * STACK;
    epoch[0] = epoch[1] = 0;
    regions.clear();
    pointers.clear();
    input = {};
    for (int i = 0; i < count; ++i) {
      const emu_buffer& b = buffers[i];
      pointers.push_back(place_region(b.name, b.bytes, b.item, b.output, false));
      memcpy(pointers.back(), b.data, b.bytes);
    }
    device_regions = regions.size();
    unsigned n[3] = {grid[0] / group[0], grid[1] / group[1], grid[2] / group[2]};
    std::vector<unsigned> groups(size_t(n[0]) * n[1] * n[2]);
    for (size_t i = 0; i < groups.size(); ++i) groups[i] = i;
    if (order == 1) std::reverse(groups.begin(), groups.end());
    for (size_t i = groups.size(); order == 2 && i > 1; --i) {
      std::swap(groups[i - 1], groups[next_random() % i]);
    }
    for (unsigned g : groups) {
      run_threadgroup({g % n[0], g / n[0] % n[1], g / n[0] / n[1]}, in_group, threads_in_grid);
    }
    for (int i = 0; i < count; ++i) {
      emu_buffer& b = buffers[i];
      b.unwritten = -1;
      if (!b.output) continue;
      memcpy(b.data, pointers[i], b.bytes);
      const auto& cells = regions[i].cells;
      for (long e = 0; e < b.bytes / b.item && b.unwritten < 0; ++e) {
        if (!cells[e].write_epoch) b.unwritten = e;
      }
    }
    status = 0;
  }
  regions.clear();
  return status;
}

// ---- What GCC calls before every access to memory, and for an index that an array does not have

#define EMU_AT (caller = __builtin_return_address(0))
#define EMU_HOOK(N) \
  void __tsan_read##N(void* p) { EMU_AT, check((char*)p, N, false, N), caller = nullptr; } \
  void __tsan_write##N(void* p) { EMU_AT, check((char*)p, N, true, N), caller = nullptr; } \
  void __tsan_unaligned_read##N(void* p) { EMU_AT, check((char*)p, N, false, 1), caller = nullptr; } \
  void __tsan_unaligned_write##N(void* p) { EMU_AT, check((char*)p, N, true, 1), caller = nullptr; }
EMU_HOOK(1)
EMU_HOOK(2)
EMU_HOOK(4)
EMU_HOOK(8)
EMU_HOOK(16)
void __tsan_read_range(void* p, long size) {
  EMU_AT, check((char*)p, size, false, 1), caller = nullptr;
}
void __tsan_write_range(void* p, long size) {
  EMU_AT, check((char*)p, size, true, 1), caller = nullptr;
}

struct emu_bad_index {
  const char* file;
  uint32_t line, column;
  const void *array, *index;
};
void __ubsan_handle_out_of_bounds(emu_bad_index* at, uintptr_t index) {
  fail("index %ld in line %u is out of its array's bounds", long(index), at->line);
}
void __tsan_init(void) {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit(void) {}
}

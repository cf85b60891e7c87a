// Runs a kernel on the CPU: a fibre for each thread of a threadgroup, one threadgroup after the
// other. The kernel is compiled with -fsanitize=thread but linked with the hooks below, so that
// every access to memory is seen: it must lie in a buffer, be aligned, and be ordered by a barrier
// against every other thread's access to the same element.
#include "runtime.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include <algorithm>
#include <string>
#include <vector>

extern "C" char __ehdr_start[] __attribute__((visibility("hidden")));
extern "C" char _end[] __attribute__((visibility("hidden")));

namespace {

const long STACK = 64 << 10, POISONED = 8 << 10, GAP = 1 << 20, LANES = 32, THREADGROUP_BYTES = 32 << 10;
const int NOBODY = -1, SEVERAL = -2, MANY = -3;

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
char *arena, *arena_end, *stacks;
unsigned random_state;
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
    snprintf(
        message + n, message_bytes - n, " (thread %u, %u, %u of threadgroup %u, %u, %u)",
        t.in_group.x, t.in_group.y, t.in_group.z, t.group.x,
        t.group.y, t.group.z);
  }
  longjmp(failed, 1);
}

// ---- Fibres

#if defined(__x86_64__)
extern "C" void emu_switch(void** save, void* load);
asm(R"(
.text
.hidden emu_switch
.globl emu_switch
emu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
#elif defined(__aarch64__)
extern "C" void emu_switch(void** save, void* load);
asm(R"(
.text
.hidden emu_switch
.globl emu_switch
emu_switch:
  sub sp, sp, #160
  stp x19, x20, [sp, #0]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x2, sp
  str x2, [x0]
  mov sp, x1
  ldp x19, x20, [sp, #0]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
)");
#else
#error "the emulator knows how to switch fibres on x86-64 and AArch64 only"
#endif

void* main_sp;

void to_main() {
  int me = current;
  current = -1;
  emu_switch(&fibres[me].sp, main_sp);
}

void entry() {
  emu_kernel(pointers.data(), &fibres[current].thread);
  fibres[current].done = true;
  --alive;
  to_main();
  abort();
}

void start(Fibre& f) {
  char* top = f.stack + STACK;
  memset(top - POISONED, 0xff, POISONED);  // NaN in uninitialised private arrays
#if defined(__x86_64__)
  void** sp = (void**)top - 2;
  *sp = (void*)entry;
  sp -= 6;
  memset(sp, 0, 6 * sizeof(void*));
#else
  void** sp = (void**)(top - 160);
  memset(sp, 0, 160);
  sp[11] = (void*)entry;
#endif
  f.sp = sp;
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

// ---- Memory

Region* region_of(const char* p) {
  auto after = std::upper_bound(
      regions.begin(), regions.end(), p, [](const char* q, const Region& r) { return q < r.base; });
  // An address in the gap before a region is nearer to that one.
  if (after != regions.end() && after->base - p <= GAP / 2) return &*after;
  return after == regions.begin() ? &*after : &*(after - 1);
}

void check_write(Region& r, Cell& c, long index) {
  int now = epoch[r.shared ? 0 : 1], step = own_simdgroup().step[r.shared ? 0 : 1];
  int mine = current / LANES;
  const char* clash = nullptr;
  int other = NOBODY;
  if (c.write_epoch >= now && c.writer != current &&
      !(c.writer / LANES == mine && c.write_step < step)) {
    clash = "wrote", other = c.writer;
  } else if (c.read_epoch >= now && c.reader != NOBODY && c.reader != current) {
    bool ordered = c.reader != MANY && c.reader_simdgroup == mine && c.read_step < step;
    if (!ordered) clash = "read", other = c.reader;
  } else if (!r.shared && c.write_epoch && c.write_epoch < first_epoch) {
    fail("'%s'[%ld] was written by another threadgroup too", r.name.c_str(), index);
  } else if (!r.shared && c.read_epoch && c.read_epoch < first_epoch) {
    fail("'%s'[%ld] is written here and read by another threadgroup", r.name.c_str(), index);
  }
  if (clash) {
    fail(
        "'%s'[%ld] is written although thread %d of the threadgroup %s it and no barrier lies "
        "between",
        r.name.c_str(), index, other, clash);
  }
  c.writer = current, c.write_epoch = now, c.write_step = step;
}

void check_read(Region& r, Cell& c, long index) {
  int now = epoch[r.shared ? 0 : 1], step = own_simdgroup().step[r.shared ? 0 : 1];
  int mine = current / LANES;
  if (c.write_epoch >= now && c.writer != current && c.writer != NOBODY &&
      !(c.writer / LANES == mine && c.write_step < step)) {
    fail(
        "'%s'[%ld] is read although thread %d of the threadgroup wrote it and no barrier lies "
        "between",
        r.name.c_str(), index, c.writer);
  }
  if (!r.shared && c.write_epoch && c.write_epoch < first_epoch) {
    fail("'%s'[%ld] is read here and written by another threadgroup", r.name.c_str(), index);
  }
  if (c.read_epoch < now || c.reader == NOBODY) {
    c.reader = current, c.reader_simdgroup = mine;
  } else if (c.reader == MANY || c.reader_simdgroup != mine) {
    c.reader = MANY;
  } else if (c.read_step < step) {
    c.reader = current;
  } else if (c.reader != current) {
    c.reader = SEVERAL;
  }
  c.read_epoch = now, c.read_step = step;
}

void check(const char* p, long size, bool write, long alignment) {
  const char* stack = stacks + current * STACK;
  if (p >= stack && p + size <= stack + STACK) return;
  if (p >= __ehdr_start && p < _end && !write) return;  // tables of constants
  if (p >= (char*)simdgroups.data() && p < (char*)(simdgroups.data() + simdgroups.size())) return;
  if (p >= (char*)fibres.data() && p < (char*)(fibres.data() + fibres.size()) && !write) return;
  const char* verb = write ? "writes" : "reads";
  if (p >= stacks && p < stacks + long(fibres.size()) * STACK) {
    fail("a thread %s private memory of another, or beyond its own", verb);
  }
  if (p < arena || p >= arena_end || regions.empty()) {
    fail("a thread %s at an address that belongs to no array", verb);
  }
  Region& r = *region_of(p);
  long offset = p - r.base, index = offset / r.item;
  if (offset < 0) index = -((-offset + r.item - 1) / r.item);
  if (offset < 0 || offset + size > r.bytes) {
    fail(
        "a thread %s '%s'[%ld], which has %ld elements", verb, r.name.c_str(),
        offset < 0 ? index : (offset + size - 1) / r.item, r.bytes / r.item);
  }
  if (write && !r.writable) fail("a thread writes '%s'[%ld], which is an input", r.name.c_str(), index);
  if (offset % alignment) {
    fail(
        "a thread %s %ld bytes at '%s'[%ld], which is no multiple of %ld bytes", verb, size,
        r.name.c_str(), index, alignment);
  }
  if (!r.writable) return;
  for (long i = index; i <= (offset + size - 1) / r.item; ++i) {
    if (write) {
      check_write(r, r.cells[i], i);
    } else {
      check_read(r, r.cells[i], i);
    }
  }
}

char* place_region(const char* name, long bytes, long item, bool writable, bool shared) {
  char* base = arena + GAP;
  if (!regions.empty()) {
    const Region& last = regions.back();
    base = last.base + (last.bytes + 4095) / 4096 * 4096 + GAP;
  }
  if (base + bytes + GAP > arena_end) fail("the emulator's arena is full");
  regions.push_back({name, base, bytes, item, writable, shared, {}});
  if (writable) regions.back().cells.resize(bytes / item + 1);
  return base;
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
    emu_buffer* buffers, int count, const unsigned* grid, const unsigned* group, int order_,
    unsigned seed, char* message_, int message_bytes_) {
  message = message_, message_bytes = message_bytes_;
  order = order_, random_state = seed * 2654435761u | 1u, current = -1;
  emu_uint3 threads_in_grid = {grid[0], grid[1], grid[2]};
  emu_uint3 in_group = {group[0], group[1], group[2]};
  threads = group[0] * group[1] * group[2];
  long total = 32 * (GAP + THREADGROUP_BYTES), stack_bytes = threads * STACK;
  for (int i = 0; i < count; ++i) total += buffers[i].bytes + 4096 + GAP;
  auto map = [](long bytes) {
    void* p = mmap(
        nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return p == MAP_FAILED ? nullptr : (char*)p;
  };
  arena = map(total), stacks = map(stack_bytes);
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
  if (arena) munmap(arena, total);
  if (stacks) munmap(stacks, stack_bytes);
  regions.clear();
  return status;
}

// ---- What GCC calls before every access to memory, and for an index that an array does not have

#define EMU_HOOK(N) \
  void __tsan_read##N(void* p) { check((char*)p, N, false, N); } \
  void __tsan_write##N(void* p) { check((char*)p, N, true, N); } \
  void __tsan_unaligned_read##N(void* p) { check((char*)p, N, false, 1); } \
  void __tsan_unaligned_write##N(void* p) { check((char*)p, N, true, 1); }
EMU_HOOK(1)
EMU_HOOK(2)
EMU_HOOK(4)
EMU_HOOK(8)
EMU_HOOK(16)
void __tsan_read_range(void* p, long size) { check((char*)p, size, false, 1); }
void __tsan_write_range(void* p, long size) { check((char*)p, size, true, 1); }

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

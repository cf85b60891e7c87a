// Part of runtime.cpp: may this thread touch this memory now?
#pragma once

Region* region_of(const char* p) {
  auto after = std::upper_bound(
      regions.begin(), regions.end(), p, [](const char* q, const Region& r) { return q < r.base; });
  // An address in the gap before a region is nearer to that one.
  if (after != regions.end() && after->base - p <= GAP / 2) return &*after;
  return after == regions.begin() ? &*after : &*(after - 1);
}

// who: COUNTING for whom others may do the same at once.
void check_write(Region& r, Cell& c, long index, int who) {
  int now = epoch[r.shared ? 0 : 1], step = own_simdgroup().step[r.shared ? 0 : 1];
  int mine = current / LANES;
  const char* clash = nullptr;
  int other = NOBODY;
  if (c.write_epoch >= now && c.writer != current && c.writer != who &&
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
  c.writer = who, c.write_epoch = now, c.write_step = step;
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

bool holds(const Region& r, const char* p, long size) {
  return p >= r.base && p + size <= r.base + r.bytes;
}

// What an access outside the arena, or outside every array in it, is, if it is allowed.
void check_odd(const char* p, long size, bool write) {
  if (p >= kernel.begin && p < kernel.end && !write) return;  // tables of constants
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
  long offset = p - r.base;
  fail(
      "a thread %s '%s'[%ld], which has %ld elements", verb, r.name.c_str(),
      offset < 0 ? -((-offset + r.item - 1) / r.item) : (offset + size - 1) / r.item,
      r.bytes / r.item);
}

// alignment: a power of two.
__attribute__((noinline)) void check_element(const char* p, long size, bool write, long alignment) {
  bool there = p >= arena && p < arena_end && !regions.empty();
  if (!there || !holds(*region_of(p), p, size)) return check_odd(p, size, write);
  Region& r = *region_of(p);
  long offset = p - r.base;
  if (!r.writable) input = {r.base, r.bytes};
  const char* verb = write ? "writes" : "reads";
  long index = offset / r.item;
  if (!r.writable && write) fail("a thread writes '%s'[%ld], which is an input", r.name.c_str(), index);
  if (offset & (alignment - 1)) {
    fail(
        "a thread %s %ld bytes at '%s'[%ld], which is no multiple of %ld bytes", verb, size,
        r.name.c_str(), index, alignment);
  }
  if (!r.writable) return;
  for (long i = index, last = (offset + size - 1) / r.item; i <= last; ++i) {
    if (write) {
      check_write(r, r.cells[i], i, current);
    } else {
      check_read(r, r.cells[i], i);
    }
  }
}

// A counter, of which a thread holds the address as an element's.
void check_counter(const char* p) {
  if (p < arena || p >= arena_end || !holds(*region_of(p), p, 4)) return check_odd(p, 4, true);
  Region& r = *region_of(p);
  long index = (p - r.base) / r.item;
  if (!r.writable) fail("a thread writes '%s'[%ld], which is an input", r.name.c_str(), index);
  check_write(r, r.cells[index], index, COUNTING);
}

// Most accesses are to private memory, or read the input that was read before.
__attribute__((always_inline)) inline void check(
    const char* p, long size, bool write, long alignment) {
  auto within = [=](const char* base, long bytes) {
    return p >= base && p + size <= base + bytes;
  };
  if (within(stacks + current * STACK, STACK)) return;
  bool aligned = !((p - input.base) & (alignment - 1));
  if (!write && aligned && within(input.base, input.bytes)) return;
  check_element(p, size, write, alignment);
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

// Attention over preallocated keys and values, a tile of BN keys at a time with online softmax:
// no scores in device memory, rows outside a sequence's range are never read.
//
// What attention_rows.metal and attention_shared.metal share, and attend_combine, which joins the
// results of parts of the keys.

#define EACH(i, count) _Pragma("unroll") for (int i = 0; i < (count); ++i)

// 16 bytes into threadgroup memory, zeros where not live. CUDA copies while the thread goes on.
#ifdef MOEFLUX_CUDA
template <typename T>
inline void copy_async(threadgroup T* to, const device T* from, bool live) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                   uint(__cvta_generic_to_shared(to))),
               "l"(from), "r"(live ? 16 : 0)
               : "memory");
}
inline void copy_wait() {
  asm volatile("cp.async.wait_all;" ::: "memory");
}
#else
template <typename T>
inline void copy_async(threadgroup T* to, const device T* from, bool live) {
  EACH(i, 16 / int(sizeof(T))) {
    to[i] = live ? T(from[i]) : T(0.0f);
  }
}
inline void copy_wait() {}
#endif
// What was copied is there for all threads.
inline void arrive() {
  copy_wait();
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// Rows first .. first + COUNT of x [*, D1] and beside them x2 [*, D2], into rows of LD values; rows
// outside [low, high) are not read and become zeros. With TAIL rows from `start` on are in `tail`
// and `tail2`. With PAGE the others are in blocks of so many of the rows of x [*, HEADS, D1], which
// `table` gives from row `origin` on; with HEADS = 0 in those of x [*, D1] itself, and `start` is such
// a row. Rows of x are X apart.
template <typename T, int D1, int D2, int LD, int COUNT, int THREADS, bool TAIL = false,
          int PAGE = 0, int HEADS = 1, int X = D1>
inline void stage(
    threadgroup T* to, const device T* x, const device T* x2, int first, int low, int high,
    uint index, const device T* tail = nullptr, int start = 0, const device T* tail2 = nullptr,
    const device int* table = nullptr, int origin = 0) {
  constexpr int WIDE = 16 / int(sizeof(T)), CHUNKS = (D1 + D2) / WIDE;
  for (int i = int(index); i < COUNT * CHUNKS; i += THREADS) {
    const int row = first + i / CHUNKS, at = i % CHUNKS * WIDE;
    const bool live = row >= low && row < high;
    const device T* from = D2 == 0 || at < D1 ? x + row * X + at : x2 + row * D2 + at - D1;
    int newest = row - start;
    if (PAGE > 0 && live) {
      const int page = metal::max(PAGE, 1), own = row - origin;
      const int place = table[own / page] * page + own % page;
      from = x + size_t(place) * (metal::max(HEADS, 1) * D1) + at;
      newest = HEADS == 0 ? place - start : newest;
    }
    if (TAIL && newest >= 0) {
      from = D2 == 0 || at < D1 ? tail + newest * D1 + at : tail2 + newest * D2 + at - D1;
    }
    copy_async(to + i / CHUNKS * LD + at, live ? from : x, live);
  }
}

// Below every score; finite, so that differences are never NaN.
inline float no_score() {
  return -3.0e38f;
}

// Raises the maximum to `highest`; returns by what sums shrink. A maximum that is up to 2^8 too
// small does no harm, and spares most rescaling.
inline float raised(thread float& top, float highest) {
  float factor = 1.0f;
  if (highest - top > 8.0f) {
    factor = metal::exp2(top - highest);
    top = highest;
  }
  return factor;
}

// Keys of a part: those from start to high shared out in whole tiles.
struct key_range {
  int low, high;
};
inline int share_of(int start, int high, int tile, uint parts) {
  const int unit = int(parts) * tile;
  return (metal::max(high - start, 0) + unit - 1) / unit * tile;
}
inline key_range part_of(int start, int high, int tile, uint part, uint parts) {
  const int share = share_of(start, high, tile, parts);
  const int low = start + int(part) * share;
  return {low, metal::min(high, low + share)};
}

// N neighbours of y [B, T, HQ, DV], through the sigmoid of their gates. GATE 1: the gate is
// [B, T, HQ, DV]; 2: the second half of [B, T, HQ, 2 DV]. row: heads past `head` * tokens + token.
template <typename T, int DV, int HQ, int GATE, int N>
inline void write_attended(
    device T* y, const device T* gate, pack<float, N> x, int b, int head, int row, int column,
    int tokens) {
  const size_t at = (size_t(b) * tokens + row % tokens) * HQ + head + row / tokens;
  pack<T, N> out;
  EACH(e, N) {
    float value = x.at[e];
    if (GATE > 0) {
      value *= sigmoid(float(gate[at * (GATE * DV) + (GATE - 1) * DV + column + e]));
    }
    out.at[e] = T(value);
  }
  store_pack(y + at * DV + column, out);
}

// The largest of the parts' maxima; `base`: of the first part's row.
inline float highest_top(const device float* stats, size_t base, int parts, int rows, int lane) {
  float highest = no_score();
  for (int s = lane; s < parts; s += 32) {
    highest = metal::max(highest, stats[2 * (base + size_t(s) * rows)]);
  }
  return simd_max(highest);
}

// Every eighth part from `from` on, MANY of them: PACKS times N columns, and tops and totals. Those
// that are not there are the last one.
template <int MANY, int N, int PACKS>
struct some_parts {
  pack<float, N> in[MANY][PACKS];
  pack<float, 2> own[MANY];
};
template <int DV, int MANY, int N, int PACKS>
inline void fetch_parts(
    thread some_parts<MANY, N, PACKS>& some, const device float* partial, const device float* stats,
    size_t base, int parts, int rows, int from, int column) {
  EACH(j, MANY) {
    const size_t at = base + size_t(metal::min(from + 8 * j, parts - 1)) * rows;
    some.own[j] = load_pack<2>(stats + 2 * at);
    EACH(p, PACKS) {
      some.in[j][p] = load_pack<N>(partial + at * DV + column + p * (DV / PACKS));
    }
  }
}

// value += 2^(top - highest) partial of columns and total += of the totals, of every eighth part from
// `first` on, of which `some` has some. The columns of packs are DV / PACKS apart.
template <int DV, int MANY, int N, int PACKS>
inline float add_parts(
    thread float* value, thread some_parts<MANY, N, PACKS>& some, const device float* partial,
    const device float* stats, float highest, size_t base, int parts, int rows, int first,
    int column) {
  float total = 0.0f;
  #pragma unroll 1
  for (int from = first; from < parts; from += 8 * MANY) {
    if (from > first) {
      fetch_parts<DV>(some, partial, stats, base, parts, rows, from, column);
    }
    EACH(j, MANY) {
      if (from + 8 * j < parts) {
        const float weight = metal::exp2(some.own[j].at[0] - highest);
        total += weight * some.own[j].at[1];
        EACH(p, PACKS) {
          EACH(e, N) {
            value[p * N + e] += weight * some.in[j][p].at[e];
          }
        }
      }
    }
  }
  return total;
}

// y = sum over parts of 2^(top - highest top) partial / the same sum of totals, to which SINKS adds
// exp(sink) of the row's head, without a value. A threadgroup of 8 simdgroups owns 32 N columns of a
// row; each takes every eighth part.
template <typename T, int DV, int HQ, int PACK, int GATE, int N, bool SINKS, typename S>
inline void attend_combine(
    const device float* partial, const device float* stats, const device T* gate,
    const device S* sinks, device T* y, threadgroup float* shared, int parts, int rows,
    uint3 position, uint index) {
  const int lane = int(index % 32), w = int(index / 32);
  const int first = 32 * N * int(position.x), row = int(position.y), group = int(position.z);
  const size_t base = size_t(group) * parts * rows + row;
  // What all parts have is on its way while the highest top is found.
  some_parts<8, N, 1> some;
  fetch_parts<DV>(some, partial, stats, base, parts, rows, w, first + N * lane);
  const float highest = highest_top(stats, base, parts, rows, lane);
  float value[N] = {};
  float total = add_parts<DV>(
      value, some, partial, stats, highest, base, parts, rows, w, first + N * lane);
  EACH(e, N) {
    shared[w * 32 * N + N * lane + e] = value[e];
  }
  shared[256 * N + index] = total;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (w < N) {
    float sum = 0.0f;
    total = 0.0f;
    EACH(i, 8) {
      sum += shared[i * 32 * N + int(index)];
      total += shared[256 * N + 32 * i + lane];
    }
    const int tokens = rows / PACK, b = group / (HQ / PACK), head = group % (HQ / PACK) * PACK;
    if (SINKS) {
      total += metal::exp2(float(sinks[head + row / tokens]) * 1.44269504f - highest);
    }
    write_attended<T, DV, HQ, GATE, 1>(
        y, gate, {total > 0.0f ? sum / total : 0.0f}, b, head, row, first + int(index), tokens);
  }
}

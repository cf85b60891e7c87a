// The blocks of tokens that an indexer scores best.
#include "router.metal"

// x, or 0 below it; NaN stays.
inline float relu(float x) {
  return x <= 0.0f ? 0.0f : x;
}

// scores[t, i] = sum over heads of relu(q . k), without the factor that all have. A lane has a block,
// for QUERIES tokens; P values of a key are one access. A block that is nowhere is the last.
// Threadgroups: (blocks, tokens, B).
template <int H, int DI, int QUERIES, int P, bool TAILED, typename T>
inline void block_scores(
    const device T* q,
    const device T* blocks,
    const device T* tail,
    const device int* before,
    device float* scores,
    threadgroup float* queries,
    int tokens,
    int count,
    int tail_count,
    uint3 position,
    uint index) {
  const int b = int(position.z), first = int(position.y) * QUERIES, total = count + tail_count;
  const int here = metal::min(QUERIES, tokens - first), i = int(position.x) * 128 + int(index);
  for (int j = int(index); j < QUERIES * H * DI; j += 128) {
    const int head = j / DI % H, query = j / (H * DI);
    const size_t row = size_t(b * H + head) * tokens + first + query;
    queries[j] = query < here ? float(q[row * DI + j % DI]) : 0.0f;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (i < total) {
    const int newest = TAILED ? i - before[b] : -1;
    const device T* key = blocks + (size_t(b) * count + metal::min(i, count - 1)) * DI;
    if (newest >= 0) {
      key = tail + (size_t(b) * tail_count + metal::min(newest, tail_count - 1)) * DI;
    }
    float products[QUERIES * H] = {};
    for (int d = 0; d < DI; d += P) {
      const pack<T, P> part = load_pack<P>(key + d);
      for (int j = 0; j < QUERIES * H; ++j) {
        for (int e = 0; e < P; ++e) {
          products[j] = metal::fma(queries[j * DI + d + e], float(part.at[e]), products[j]);
        }
      }
    }
    for (int query = 0; query < here; ++query) {
      float sum = 0.0f;
      for (int head = 0; head < H; ++head) {
        sum += relu(products[query * H + head]);
      }
      scores[size_t(b * tokens + first + query) * total + i] = sum;
    }
  }
}

// The sum over all threads; everybody meets twice.
template <int SIMDGROUPS>
inline uint sum_of_all(uint own, threadgroup uint* counts, uint simdgroup, uint lane) {
  own = simd_sum(own);
  if (lane == 0) {
    counts[simdgroup] = own;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  uint sum = 0;
  for (int i = 0; i < SIMDGROUPS; ++i) {
    sum += counts[i];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return sum;
}

// The sum over the threads before this one; everybody meets.
template <int SIMDGROUPS>
inline uint sum_before(uint own, threadgroup uint* counts, uint simdgroup, uint lane) {
  const uint before = simd_prefix_exclusive_sum(own);
  if (lane == 31) {
    counts[simdgroup] = before + own;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  uint sum = before;
  for (uint i = 0; i < simdgroup; ++i) {
    sum += counts[i];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return sum;
}

// The K best of the first `complete` scores, which are none of them negative, ascending; then `complete`.
template <int K, int SIMDGROUPS>
inline void best_blocks(
    const device float* scores,
    int complete,
    device int* chosen,
    threadgroup uint* counts,
    int total,
    uint simdgroup,
    uint lane) {
  const int threads = 32 * SIMDGROUPS, index = int(simdgroup * 32 + lane);
  const int count = metal::min(complete, total);
  // Bit by bit the largest key that K scores reach, and how many are above it.
  uint least = 0, above = 0;
  if (count > K) {
    for (uint bit = 0x80000000u; bit != 0; bit >>= 1) {
      uint own = 0;
      for (int i = index; i < count; i += threads) {
        own += ordered_bits(scores[i]) >= (least | bit) ? 1 : 0;
      }
      const uint reach = sum_of_all<SIMDGROUPS>(own, counts, simdgroup, lane);
      if (reach >= K) {
        least |= bit;
      } else {
        above = reach;
      }
    }
  }
  const uint room = uint(K) - above;
  // Each thread has neighbours: how many of them, and of all before, are above or equal?
  const int each = (count + threads - 1) / threads;
  const int begin = metal::min(index * each, count), end = metal::min(begin + each, count);
  uint higher = 0, equal = 0;
  for (int i = begin; i < end; ++i) {
    const uint key = ordered_bits(scores[i]);
    higher += key > least ? 1 : 0;
    equal += key == least ? 1 : 0;
  }
  higher = sum_before<SIMDGROUPS>(higher, counts, simdgroup, lane);
  equal = sum_before<SIMDGROUPS>(equal, counts, simdgroup, lane);
  for (int i = begin; i < end; ++i) {
    const uint key = ordered_bits(scores[i]);
    if (key > least || (key == least && equal < room)) {
      chosen[higher + metal::min(equal, room)] = i;
    }
    higher += key > least ? 1 : 0;
    equal += key == least ? 1 : 0;
  }
  for (int i = metal::min(count, K) + index; i <= K; i += threads) {
    chosen[i] = complete;
  }
}

// The positions that an indexer scores best.
#include "attention.metal"
#include "choose_blocks.metal"

// scores [B * TOKENS, COLUMNS]: of each token sum over heads of weight relu(q . k), for all
// positions from a sequence's first to its last; 0 elsewhere. A threadgroup has BN positions, whose
// keys it reads once, a simdgroup NS tiles of 8. q [B, H, TOKENS, DI], factors [B, TOKENS, H]; the
// keys of the newest rows are in tail [B, TAIL, DI]. Threadgroups: (COLUMNS / BN, B).
template <int H, int DI, int TOKENS, int W, int NS, int TAIL, typename T, typename S>
inline void position_scores(
    const device T* q, const device S* factors, const device T* keys, const device T* tail,
    const device int* ranges, device float* scores, threadgroup T* tile, threadgroup T* queries,
    int capacity, uint3 position, uint3 counts, uint index) {
  constexpr int MT = (H + 15) / 16, LD = DI + 8, BN = 8 * NS * W, THREADS = 32 * W;
  const uint lane = index % 32;
  const int b = int(position.y), first = int(position.x) * BN, columns = int(counts.x) * BN;
  const int own = int(index / 32) * 8 * NS, low = ranges[2 * b], high = ranges[2 * b + 1];
  scores += size_t(b) * TOKENS * columns + first;
  if (first >= high || first + BN <= low) {
    for (int i = int(index); i < TOKENS * BN; i += THREADS) {
      scores[size_t(i / BN) * columns + i % BN] = 0.0f;
    }
    return;
  }
  const int newest = TAIL ? (high - 1) / metal::max(TAIL, 1) * TAIL : 0;
  stage<T, DI, 0, LD, BN, THREADS, (TAIL > 0)>(
      tile, keys + size_t(b) * capacity * DI, keys, first, low, high, index,
      tail + size_t(b) * TAIL * DI, newest);
  #pragma unroll 1
  for (int t = 0; t < TOKENS; ++t) {
    const device T* rows = q + (size_t(b) * H * TOKENS + t) * DI;
    stage<T, DI, 0, LD, 16 * MT, THREADS, false, 0, 1, TOKENS * DI>(
        queries, rows, rows, 0, 0, H, index);
    arrive();
    tile_c products[MT][NS];
    EACH(m, MT) {
      EACH(n, NS) {
        fill(products[m][n], 0.0f);
      }
    }
    EACH(i, DI / 16) {
      tile_b<T> right[NS];
      EACH(n, NS) {
        load_b_t(right[n], tile + (own + 8 * n) * LD + 16 * i, LD, lane);
      }
      EACH(m, MT) {
        tile_a<T> left;
        load_a(left, queries + 16 * m * LD + 16 * i, LD, lane);
        EACH(n, NS) {
          mma(products[m][n], left, right[n]);
        }
      }
    }
    float sums[NS][2] = {};
    EACH(m, MT) {
      EACH(i, 2) {
        const int head = 16 * m + products[m][0].row(2 * i, lane);
        const float factor =
            head < H ? float(factors[(size_t(b) * TOKENS + t) * H + head]) : 0.0f;
        EACH(n, NS) {
          EACH(c, 2) {
            sums[n][c] = metal::fma(factor, relu(products[m][n][2 * i + c]), sums[n][c]);
          }
        }
      }
    }
    EACH(n, NS) {
      EACH(c, 2) {
        const float sum = column_sum(sums[n][c]);
        if (products[0][n].row(c, lane) == 0) {
          scores[size_t(t) * columns + own + 8 * n + products[0][n].col(c, lane)] = sum;
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
}

// Scores at N places of a stretch as they compare, 0 where there is none. All loads are under way at
// once: none waits for a condition. `high` is above 0.
template <int N>
struct many_keys {
  uint at[4 * N];
};
template <int N>
inline many_keys<N> fetch_keys(const device float* scores, int first, int low, int high) {
  pack<float, 4> some[N];
  EACH(n, N) {
    some[n] = load_pack<4>(scores + metal::min(first + 128 * n, (high - 1) / 4 * 4));
  }
  const uint count = uint(metal::max(high - low, 0));
  many_keys<N> keys;
  EACH(n, 4 * N) {
    const uint key = ordered_bits(some[n / 4].at[n % 4]);
    keys.at[n] = uint(first + n / 4 * 128 + n % 4 - low) < count ? key : 0;
  }
  return keys;
}

// ---- Digits of 11 bits, a bin for each

template <int SIMDGROUPS>
inline void clear_bins(threadgroup atomic_uint* bins, uint index) {
  EACH(n, 64 / SIMDGROUPS) {
    atomic_store_explicit(bins + 32 * SIMDGROUPS * n + index, 0, memory_order_relaxed);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}
inline void count_in(threadgroup atomic_uint* bins, uint digit) {
  atomic_fetch_add_explicit(bins + (digit & 2047), 1, memory_order_relaxed);
}

// The digit of the `wanted`-th largest key of all that are counted, how many have a larger one, and
// how many this or a larger one. Everybody meets.
struct digit_of {
  uint digit, above, reach;
};
template <int SIMDGROUPS>
inline digit_of find_digit(
    threadgroup atomic_uint* bins, threadgroup uint* counts, uint wanted, uint simdgroup, uint lane) {
  constexpr int BINS = 64 / SIMDGROUPS;
  const uint largest = 2047 - (simdgroup * 32 + lane) * BINS;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  uint own[BINS], sum = 0;
  EACH(n, BINS) {
    own[n] = atomic_load_explicit(bins + largest - n, memory_order_relaxed);
    sum += own[n];
  }
  uint above = sum_before<SIMDGROUPS>(sum, counts, simdgroup, lane);
  threadgroup uint* found = counts + 2 * SIMDGROUPS;
  EACH(n, BINS) {
    if (above < wanted && above + own[n] >= wanted) {
      found[0] = largest - n;
      found[1] = above;
      found[2] = above + own[n];
    }
    above += own[n];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return {found[0], found[1], found[2]};
}

// The K best of the scores from `low` to `high` - 1, ascending; fewer are followed by high - 1. A
// simdgroup has a stretch of the scores, in multiples of 128.
template <int K, int SIMDGROUPS>
inline void best_positions(
    const device float* scores, device int* chosen, threadgroup atomic_uint* bins,
    threadgroup uint* counts, int low, int high, uint simdgroup, uint lane) {
  // 1,024 threads have 64 registers each.
  constexpr int THREADS = 32 * SIMDGROUPS, N = SIMDGROUPS <= 8 ? 4 : 2;
  constexpr int PLACES = K <= 4 * THREADS ? 4 : 4 * N;
  const int share = (high + 128 * SIMDGROUPS - 1) / (128 * SIMDGROUPS) * 128;
  const int first = int(simdgroup) * share, end = metal::min(first + share, high);
  const int count = metal::max(high - low, 0), begin = first + 4 * int(lane);
  const uint index = simdgroup * 32 + lane;
  // The largest key that K scores reach, how many do, and how many are above all that begin with
  // its known bits.
  uint least = 0, known = 0, above = 0, reach = uint(count);
  // A key that it cannot be below: the largest keys at some places of every thread are keys too, and
  // what K of them reach K scores reach. Few keys are as large, and counters are slow where many meet.
  uint bound = 0;
  if (K <= PLACES * THREADS && reach > PLACES * THREADS) {
    uint largest[PLACES] = {};
    for (int i = begin; i < end; i += 128 * N) {
      const many_keys<N> keys = fetch_keys<N>(scores, i, low, end);
      EACH(n, 4 * N) {
        largest[n % PLACES] = metal::max(largest[n % PLACES], keys.at[n]);
      }
    }
    clear_bins<SIMDGROUPS>(bins, index);
    EACH(n, PLACES) {
      count_in(bins, largest[n] >> 21);
    }
    bound = find_digit<SIMDGROUPS>(bins, counts, K, simdgroup, lane).digit << 21;
  }
  #pragma unroll 1
  for (int shift = 21; reach > K && ~known != 0; shift = metal::max(shift - 11, 0)) {
    clear_bins<SIMDGROUPS>(bins, index);
    for (int i = begin; i < end; i += 128 * N) {
      const many_keys<N> keys = fetch_keys<N>(scores, i, low, end);
      EACH(n, 4 * N) {
        const uint key = keys.at[n];
        if (key >= bound && (key & known) == least) {
          count_in(bins, key >> shift);
        }
      }
    }
    const digit_of found = find_digit<SIMDGROUPS>(bins, counts, K - above, simdgroup, lane);
    reach = above + found.reach;
    above += found.above;
    least |= found.digit << shift;
    known = 0xffffffffu << shift;
  }
  // If K scores or fewer reach it, all of them are chosen, else the first of those that are equal.
  const uint room = reach > K ? K - above : 0;
  const uint limit = reach > K ? least : metal::max(least, 1u) - 1;
  uint own[2] = {};
  for (int i = begin; i < end; i += 128 * N) {
    const many_keys<N> keys = fetch_keys<N>(scores, i, low, end);
    EACH(n, 4 * N) {
      const uint key = keys.at[n];
      own[0] += key > limit ? 1 : 0;
      own[1] += key == limit ? 1 : 0;
    }
  }
  EACH(n, 2) {
    const uint sum = simd_sum(own[n]);
    if (lane == 0) {
      counts[n * SIMDGROUPS + simdgroup] = sum;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  uint higher = simd_sum(lane < simdgroup ? counts[lane] : 0u);
  uint equal = simd_sum(lane < simdgroup ? counts[SIMDGROUPS + lane] : 0u);
  for (int i = first; i < end; i += 128 * N) {
    const int at = i + 4 * int(lane);
    const many_keys<N> keys = fetch_keys<N>(scores, at, low, end);
    // Those above and those equal, a byte for each place.
    uint over = 0, same = 0;
    EACH(n, 4 * N) {
      const uint key = keys.at[n];
      over += key > limit ? 1u << n / 4 * 8 : 0;
      same += key == limit ? 1u << n / 4 * 8 : 0;
    }
    const uint over_before = simd_prefix_exclusive_sum(over);
    const uint same_before = simd_prefix_exclusive_sum(same);
    over = simd_shuffle(over_before + over, 31);
    same = simd_shuffle(same_before + same, 31);
    EACH(n, N) {
      uint rank = higher + (over_before >> 8 * n & 0xff), tie = equal + (same_before >> 8 * n & 0xff);
      EACH(e, 4) {
        const uint key = keys.at[4 * n + e];
        if (key > limit || (key == limit && tie < room)) {
          chosen[rank + metal::min(tie, room)] = at + 128 * n + e;
        }
        rank += key > limit ? 1 : 0;
        tie += key == limit ? 1 : 0;
      }
      higher += over >> 8 * n & 0xff;
      equal += same >> 8 * n & 0xff;
    }
  }
  for (int i = count + int(index); i < K; i += THREADS) {
    chosen[i] = high - 1;
  }
}

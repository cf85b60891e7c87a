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

// Four scores as they compare, 0 where there is none.
struct four_keys {
  uint at[4];
};
inline four_keys fetch_keys(const device float* scores, int first, int low, int high) {
  four_keys keys = {};
  if (first < high) {
    const pack<float, 4> some = load_pack<4>(scores + first);
    for (int e = 0; e < 4; ++e) {
      const bool seen = first + e >= low && first + e < high;
      keys.at[e] = seen ? ordered_bits(some.at[e]) : 0;
    }
  }
  return keys;
}

// The sums of N numbers over all threads; everybody meets twice.
template <int N, int SIMDGROUPS>
inline void sum_all(thread uint* own, threadgroup uint* counts, uint simdgroup, uint lane) {
  for (int n = 0; n < N; ++n) {
    const uint sum = simd_sum(own[n]);
    if (lane == 0) {
      counts[n * SIMDGROUPS + simdgroup] = sum;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int n = 0; n < N; ++n) {
    own[n] = simd_sum(lane < SIMDGROUPS ? counts[n * SIMDGROUPS + lane] : 0u);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// The K best of the scores from `low` to `high` - 1, ascending; fewer are followed by high - 1. A
// simdgroup has a stretch of the scores, in multiples of 128.
template <int K, int SIMDGROUPS>
inline void best_positions(
    const device float* scores, device int* chosen, threadgroup uint* counts, int low, int high,
    uint simdgroup, uint lane) {
  const int share = (high + 128 * SIMDGROUPS - 1) / (128 * SIMDGROUPS) * 128;
  const int begin = int(simdgroup) * share, end = metal::min(begin + share, high);
  const int count = metal::max(high - low, 0), mine = 4 * int(lane);
  // Two bits at a time the largest key that K scores reach, how many do, and how many are above all
  // that begin with its bits.
  uint least = 0, above = 0, reach = uint(count);
  #pragma unroll 1
  for (int shift = 30; shift >= 0 && reach > K; shift -= 2) {
    uint own[3] = {};
    #pragma unroll 4
    for (int i = begin; i < end; i += 128) {
      const four_keys keys = fetch_keys(scores, i + mine, low, end);
      for (int e = 0; e < 4; ++e) {
        for (uint digit = 0; digit < 3; ++digit) {
          own[digit] += keys.at[e] >= (least | (digit + 1) << shift) ? 1 : 0;
        }
      }
    }
    sum_all<3, SIMDGROUPS>(own, counts, simdgroup, lane);
    uint found = 0;
    for (uint digit = 0; digit < 3; ++digit) {
      found += own[digit] >= K ? 1 : 0;
    }
    for (uint digit = 0; digit < 3; ++digit) {
      reach = digit + 1 == found ? own[digit] : reach;
      above = digit == found ? own[digit] : above;
    }
    least |= found << shift;
  }
  // If K scores or fewer reach it, all of them are chosen, else the first of those that are equal.
  const uint room = reach > K ? K - above : 0;
  const uint limit = reach > K ? least : metal::max(least, 1u) - 1;
  uint own[2] = {};
  #pragma unroll 4
  for (int i = begin; i < end; i += 128) {
    const four_keys keys = fetch_keys(scores, i + mine, low, end);
    for (int e = 0; e < 4; ++e) {
      own[0] += keys.at[e] > limit ? 1 : 0;
      own[1] += keys.at[e] == limit ? 1 : 0;
    }
  }
  for (int n = 0; n < 2; ++n) {
    const uint sum = simd_sum(own[n]);
    if (lane == 0) {
      counts[n * SIMDGROUPS + simdgroup] = sum;
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  uint higher = simd_sum(lane < simdgroup ? counts[lane] : 0u);
  uint equal = simd_sum(lane < simdgroup ? counts[SIMDGROUPS + lane] : 0u);
  for (int i = begin; i < end; i += 128) {
    const four_keys keys = fetch_keys(scores, i + mine, low, end);
    // Those above in the lower half, those equal in the upper one.
    uint sum = 0;
    for (int e = 0; e < 4; ++e) {
      sum += (keys.at[e] > limit ? 1 : 0) + (keys.at[e] == limit ? 1u << 16 : 0);
    }
    const uint before = simd_prefix_exclusive_sum(sum);
    uint over = higher + (before & 0xffff), same = equal + (before >> 16);
    for (int e = 0; e < 4; ++e) {
      if (keys.at[e] > limit || (keys.at[e] == limit && same < room)) {
        chosen[over + metal::min(same, room)] = i + mine + e;
      }
      over += keys.at[e] > limit ? 1 : 0;
      same += keys.at[e] == limit ? 1 : 0;
    }
    higher = simd_shuffle(over, 31);
    equal = simd_shuffle(same, 31);
  }
  for (int i = count + int(simdgroup * 32 + lane); i < K; i += 32 * SIMDGROUPS) {
    chosen[i] = high - 1;
  }
}

// The choice of experts: one simdgroup a token, every lane holds each 32nd expert.

// Bits that compare as the numbers do; -0 is 0, NaN is largest, nothing is 0.
inline uint ordered_bits(float x) {
  const uint bits = as_type<uint>(x + 0.0f);
  return x != x ? 0xffffffffu : bits ^ (uint(int(bits) >> 31) | 0x80000000u);
}
inline float from_ordered_bits(uint bits) {
  return as_type<float>(bits >> 31 ? bits & 0x7fffffffu : ~bits);
}

template <int EACH>
struct lane_keys {
  uint at[EACH];
};

// The largest key of all lanes is taken out; equal ones: that of the lowest index first.
template <int EACH>
inline uint take_largest(thread lane_keys<EACH>& keys, uint lane, thread uint& largest) {
  uint own = 0, at = 0xffffffffu;
  for (int i = 0; i < EACH; ++i) {
    if (keys.at[i] > own) {
      own = keys.at[i];
      at = lane + 32 * i;
    }
  }
  largest = simd_max(own);
  const uint index = simd_min(own == largest ? at : 0xffffffffu);
  for (int i = 0; i < EACH; ++i) {
    if (lane + 32 * i == index) {
      keys.at[i] = 0;
    }
  }
  return index;
}

// How many of the first K lanes have a smaller id.
template <int K>
inline uint rank_of(uint id) {
  uint rank = 0;
  for (uint k = 0; k < K; ++k) {
    rank += simd_shuffle(id, k) < id ? 1 : 0;
  }
  return rank;
}

// All lanes call it. Lane k < K writes the id and the weight that it chose as k-th best.
template <int K, typename I, typename F>
inline void write_choice(I ids, F weights, uint lane, uint id, float weight) {
  const uint rank = rank_of<K>(id);
  if (lane < K) {
    ids[rank] = id;
    weights[rank] = weight;
  }
}

// Of one token; ids and weights are pointers, to device or threadgroup memory.
template <int E, int K, bool NORMALISE, typename T, typename I, typename F>
inline void softmax_choice(const device T* logits, I ids, F weights, uint lane) {
  constexpr int EACH = (E + 31) / 32;
  lane_keys<EACH> keys;
  for (int i = 0; i < EACH; ++i) {
    const uint e = lane + 32 * i;
    keys.at[i] = e < E ? ordered_bits(float(logits[e])) : 0;
  }
  uint id = 0xffffffffu, own = 0;
  float highest = 0.0f, total = 0.0f;
  // Short: most of the time goes into fetching instructions that run once.
  #pragma unroll 1
  for (uint k = 0; k < K; ++k) {
    uint key;
    const uint best = take_largest(keys, lane, key);
    if (k == 0) {
      highest = from_ordered_bits(key);
    }
    if (lane == k) {
      id = best;
      own = key;
    }
  }
  const float weight =
      lane < K ? metal::precise::exp(from_ordered_bits(own) - highest) : 0.0f;
  if (!NORMALISE) {
    // Those that were not chosen count too.
    for (int i = 0; i < EACH; ++i) {
      total += keys.at[i] != 0 ? metal::precise::exp(from_ordered_bits(keys.at[i]) - highest) : 0.0f;
    }
  }
  total = simd_sum(total + weight);
  write_choice<K>(ids, weights, lane, id, weight / total);
}

template <typename T, int E, int K, bool NORMALISE>
inline void softmax_top_k(
    const device T* logits, device uint* ids, device float* weights, uint tokens, uint token,
    uint lane) {
  if (token < tokens) {
    softmax_choice<E, K, NORMALISE>(
        logits + token * E, ids + token * K, weights + token * K, lane);
  }
}

// The sums of the two largest keys of each group: lane g gets that of group g. Step by step for all
// groups, so that they wait for each other's lanes together.
template <int EACH, int GROUPS, int SIZE>
inline float group_scores(const thread lane_keys<EACH>& keys, uint lane) {
  uint first[GROUPS], second[GROUPS], best[GROUPS];
  #pragma unroll
  for (uint g = 0; g < GROUPS; ++g) {
    first[g] = second[g] = 0;
    for (int i = 0; i < EACH; ++i) {
      const bool member = SIZE % 32 == 0 ? uint(32 * i / SIZE) == g : (lane + 32 * i) / SIZE == g;
      const uint key = member ? keys.at[i] : 0;
      second[g] = metal::max(second[g], metal::min(first[g], key));
      first[g] = metal::max(first[g], key);
    }
  }
  #pragma unroll
  for (uint g = 0; g < GROUPS; ++g) {
    best[g] = simd_max(first[g]);
  }
  #pragma unroll
  for (uint g = 0; g < GROUPS; ++g) {
    // The lane that has the largest offers its next one.
    const uint holder = simd_min(first[g] == best[g] ? lane : 32u);
    second[g] = lane == holder ? second[g] : first[g];
  }
  float score = 0.0f;
  #pragma unroll
  for (uint g = 0; g < GROUPS; ++g) {
    const uint next = simd_max(second[g]);
    score = lane == g ? from_ordered_bits(best[g]) + from_ordered_bits(next) : score;
  }
  return score;
}

// Of one token. SCALE: the bits of a float.
template <int E, int K, int GROUPS, int KEPT, bool NORMALISE, int SCALE, typename T, typename I,
          typename F>
inline void sigmoid_choice(
    const device T* logits, const device float* bias, I ids, F weights, uint lane) {
  constexpr int EACH = (E + 31) / 32;
  lane_keys<EACH> keys;
  for (int i = 0; i < EACH; ++i) {
    const uint e = lane + 32 * i;
    keys.at[i] = e < E ? ordered_bits(sigmoid(float(logits[e])) + bias[e]) : 0;
  }
  if (KEPT < GROUPS) {
    constexpr int SIZE = E / GROUPS;
    lane_keys<1> group;
    const float score = group_scores<EACH, GROUPS, SIZE>(keys, lane);
    group.at[0] = lane < GROUPS ? ordered_bits(score) : 0;
    uint kept = 0, key;
    #pragma unroll 1
    for (int k = 0; k < KEPT; ++k) {
      kept |= 1u << take_largest(group, lane, key);
    }
    for (int i = 0; i < EACH; ++i) {
      keys.at[i] = kept >> ((lane + 32 * i) / SIZE & 31) & 1 ? keys.at[i] : 0;
    }
  }
  uint id = 0xffffffffu;
  #pragma unroll 1
  for (uint k = 0; k < K; ++k) {
    uint key;
    const uint best = take_largest(keys, lane, key);
    id = lane == k ? best : id;
  }
  float weight = lane < K ? sigmoid(float(logits[id])) : 0.0f;
  const float total = simd_sum(weight);
  weight = (NORMALISE ? weight / (total + 1e-20f) : weight) * as_type<float>(SCALE);
  write_choice<K>(ids, weights, lane, id, weight);
}

template <typename T, int E, int K, int GROUPS, int KEPT, bool NORMALISE, int SCALE>
inline void sigmoid_top_k(
    const device T* logits, const device float* bias, device uint* ids, device float* weights,
    uint tokens, uint token, uint lane) {
  if (token < tokens) {
    sigmoid_choice<E, K, GROUPS, KEPT, NORMALISE, SCALE>(
        logits + token * E, bias, ids + token * K, weights + token * K, lane);
  }
}

// The choice of experts: one simdgroup a token, every lane holds each 32nd expert.

// Bits that compare as the numbers do; -0 is 0, NaN is largest, nothing is 0.
inline uint ordered_bits(float x) {
  const uint bits = as_type<uint>(x + 0.0f);
  return x != x ? 0xffffffffu : bits >> 31 ? ~bits : bits | 0x80000000u;
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
  uint id = 0xffffffffu;
  float highest = 0.0f, weight = 0.0f, total = 0.0f;
  for (uint k = 0; k < K; ++k) {
    uint key;
    const uint best = take_largest(keys, lane, key);
    if (k == 0) {
      highest = from_ordered_bits(key);
    }
    if (lane == k) {
      id = best;
      weight = metal::precise::exp(from_ordered_bits(key) - highest);
    }
  }
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

// Sum of the two largest keys among the experts of a group.
template <int EACH, int SIZE>
inline float group_score(const thread lane_keys<EACH>& keys, uint group, uint lane) {
  lane_keys<EACH> own;
  for (int i = 0; i < EACH; ++i) {
    own.at[i] = (lane + 32 * i) / SIZE == group ? keys.at[i] : 0;
  }
  uint first, second;
  take_largest(own, lane, first);
  take_largest(own, lane, second);
  return from_ordered_bits(first) + from_ordered_bits(second);
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
    group.at[0] = 0;
    for (uint g = 0; g < GROUPS; ++g) {
      const float score = group_score<EACH, SIZE>(keys, g, lane);
      group.at[0] = lane == g ? ordered_bits(score) : group.at[0];
    }
    uint kept = 0, key;
    for (int k = 0; k < KEPT; ++k) {
      kept |= 1u << take_largest(group, lane, key);
    }
    for (int i = 0; i < EACH; ++i) {
      keys.at[i] = kept >> ((lane + 32 * i) / SIZE & 31) & 1 ? keys.at[i] : 0;
    }
  }
  uint id = 0xffffffffu;
  float weight = 0.0f;
  for (uint k = 0; k < K; ++k) {
    uint key;
    const uint best = take_largest(keys, lane, key);
    if (lane == k) {
      id = best;
      weight = sigmoid(float(logits[best]));
    }
  }
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

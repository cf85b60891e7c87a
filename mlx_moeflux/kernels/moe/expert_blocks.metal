// Products with experts in ggml's blocks, or in affine numbers, a row of bytes each. A lane takes eight
// neighbours, from `at` on, a multiple of 8: all blocks and groups are multiples of it.

inline float half_at(const device uchar* bytes) {
  return float(as_type<half>(ushort(uint(bytes[0]) | uint(bytes[1]) << 8)));
}

// The BITS bits of a byte from `shift` on.
template <int BITS>
inline uint bits_of(uchar byte, uint shift) {
  return uint(byte) >> shift & ((1u << BITS) - 1);
}

inline void q2_k(thread float* to, const device uchar* block, uint at) {
  const device uchar* low = block + 16 + at / 128 * 32 + at % 32;
  const uchar pair = block[at / 16];
  const float scale = half_at(block + 80) * float(bits_of<4>(pair, 0));
  const float least = half_at(block + 82) * float(bits_of<4>(pair, 4));
  for (int j = 0; j < 8; ++j) {
    to[j] = metal::fma(scale, float(bits_of<2>(low[j], at % 128 / 32 * 2)), -least);
  }
}

inline void q3_k(thread float* to, const device uchar* block, uint at) {
  const device uchar* third = block + at % 32;
  const device uchar* low = block + 32 + at / 128 * 32 + at % 32;
  const uint group = at / 16;
  const uint bits = bits_of<4>(block[96 + group % 8], group / 8 * 4)
      | bits_of<2>(block[104 + group % 4], group / 4 * 2) << 4;
  const float scale = half_at(block + 108) * (float(bits) - 32.0f);
  for (int j = 0; j < 8; ++j) {
    const uint q = bits_of<2>(low[j], at % 128 / 32 * 2) | bits_of<1>(third[j], at / 32) << 2;
    to[j] = scale * (float(q) - 4.0f);
  }
}

inline void q6_k(thread float* to, const device uchar* block, uint at) {
  const device uchar* low = block + at / 128 * 64 + at % 64;
  const device uchar* high = block + 128 + at / 128 * 32 + at % 32;
  // A signed byte.
  const float signed_scale = float((uint(block[192 + at / 16]) ^ 128u)) - 128.0f;
  const float scale = half_at(block + 208) * signed_scale;
  for (int j = 0; j < 8; ++j) {
    const uint q = bits_of<4>(low[j], at % 128 / 64 * 4) | bits_of<2>(high[j], at % 128 / 32 * 2) << 4;
    to[j] = scale * (float(q) - 32.0f);
  }
}

// The table of IQ4_NL and IQ4_XS, plus 128, four numbers a word.
inline float of_table(uint q) {
  const uint lower = q & 4 ? 0x766a5d4fu : 0x3f2d1801u;
  const uint upper = q & 4 ? 0xf1d9c5b5u : 0xa6998d81u;
  return float((q & 8 ? upper : lower) >> q % 4 * 8 & 255u) - 128.0f;
}

inline void iq4_nl(thread float* to, const device uchar* block, uint at) {
  const float scale = half_at(block);
  for (int j = 0; j < 8; ++j) {
    to[j] = scale * of_table(bits_of<4>(block[2 + at % 16 + j], at / 16 * 4));
  }
}

inline void iq4_xs(thread float* to, const device uchar* block, uint at) {
  const device uchar* low = block + 8 + at / 32 * 16 + at % 16;
  const uint group = at / 32;
  const uint bits = bits_of<4>(block[4 + group / 2], group % 2 * 4)
      | bits_of<2>(block[2 + group / 4], group % 4 * 2) << 4;
  const float scale = half_at(block) * (float(bits) - 32.0f);
  for (int j = 0; j < 8; ++j) {
    to[j] = scale * of_table(bits_of<4>(low[j], at % 32 / 16 * 4));
  }
}

// Eight numbers of BITS bits, the lowest first, whose BITS bytes begin at `bytes`.
template <int BITS>
inline void affine(thread float* to, const device uchar* bytes, float scale, float bias) {
  for (int j = 0; j < 8; ++j) {
    const int first = j * BITS / 8, shift = j * BITS % 8;
    uint bits = uint(bytes[first]);
    if (shift + BITS > 8) {
      bits |= uint(bytes[first + 1]) << 8;
    }
    to[j] = metal::fma(scale, float(bits >> shift & ((1u << BITS) - 1)), bias);
  }
}

// KIND: a place in KINDS of expert_blocks.py, ELEMENTS and BYTES those of its blocks, BITS 0; or 0,
// affine numbers of BITS bits with a scale and a bias for each group of ELEMENTS, and BYTES of them.
template <int KIND, int ELEMENTS, int BYTES, int BITS, int IN, typename S>
inline void eight(
    thread float* to,
    const device uchar* w,
    const device S* scales,
    const device S* biases,
    ulong row,
    uint at) {
  const ulong index = row * (IN / ELEMENTS) + at / ELEMENTS;
  const device uchar* block = w + index * BYTES;
  const uint within = at % ELEMENTS;
  if (KIND == 0) {
    affine<BITS>(to, block + within / 8 * BITS, float(scales[index]), float(biases[index]));
  } else if (KIND == 1) {
    q2_k(to, block, within);
  } else if (KIND == 2) {
    q3_k(to, block, within);
  } else if (KIND == 3) {
    q6_k(to, block, within);
  } else if (KIND == 4) {
    iq4_nl(to, block, within);
  } else {
    iq4_xs(to, block, within);
  }
}

// y = w[slot] x, ROWS rows from `row` on; 0 of an absent expert, whose slot is num_slots or more.
template <int ROWS, int IN, int OUT, int KIND, int ELEMENTS, int BYTES, int BITS, typename T,
          typename W, typename S>
inline void block_rows(
    const device T* x,
    const device W* w,
    const device S* scales,
    const device S* biases,
    device float* y,
    uint num_slots,
    uint slot,
    uint row,
    uint lane) {
  float sums[ROWS];
  for (int r = 0; r < ROWS; ++r) {
    sums[r] = 0.0f;
  }
  if (slot < num_slots) {
    for (uint at = lane * 8; at < IN; at += 256) {
      float part[8];
      for (int j = 0; j < 8; ++j) {
        part[j] = float(x[at + j]);
      }
      for (int r = 0; r < ROWS; ++r) {
        float values[8];
        const ulong own = ulong(slot) * OUT + metal::min(row + r, uint(OUT - 1));
        eight<KIND, ELEMENTS, BYTES, BITS, IN>(
            values, (const device uchar*)w, scales, biases, own, at);
        for (int j = 0; j < 8; ++j) {
          sums[r] = metal::fma(values[j], part[j], sums[r]);
        }
      }
    }
  }
  for (int r = 0; r < ROWS; ++r) {
    const float total = simd_sum(sums[r]);
    if (lane == 0 && row + r < OUT) {
      y[row + r] = total;
    }
  }
}

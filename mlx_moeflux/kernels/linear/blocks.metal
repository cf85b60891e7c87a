// Matrices in ggml's blocks, eight neighbours of a block at a time: a type for each mode of
// checkpoint/blocks.py, of its name. The eight begin at `at`, a multiple of 8. fetch() reads the bytes
// of their numbers and of their scale and keeps them as they are, so that they may be on their way
// while something else is computed. An element is
//   scale(at) (number - ZERO) + added(at),  without added(at) unless ADDS,
// and word(i, at) holds four numbers as bytes. Loads are as wide as BYTES lets them be aligned.
// `lanes` says which eights a lane that shares a row with others takes at a time.

// WIDE neighbouring eights, and those whose numbers are other bits of the same bytes: TOGETHER times
// WIDE in all, APART elements from each other. Neighbours are of one group, whose scale they share.
template <int APART, int TOGETHER, int WIDE>
struct lane_eights {
  enum { COUNT = TOGETHER * WIDE, NEIGHBOURS = WIDE };
  // Where the first of the unit-th such is in a row.
  static inline uint first(uint unit) {
    const uint runs = APART / (8 * WIDE);
    return unit / runs * (APART * TOGETHER) + unit % runs * (8 * WIDE);
  }
  static inline uint offset(int i) { return i / WIDE * APART + i % WIDE * 8; }
};

inline float half_of(uint bits) {
  return float(as_type<half>(ushort(bits)));
}

inline uint ushort_at(const device uchar* p) {
  return *(const device ushort*)p;
}

// A number of less than 23 bits, minus `less`, without a conversion; see `number`.
inline float small_number(uint bits, int less = 0) {
  return as_type<float>(bits | 0x4b000000u) - float(8388608 + less);
}

// Bits 0 to 3, each in a byte of its own.
inline uint in_bytes(uint bits) {
  return (bits & 15) * 0x00204081u & 0x01010101u;
}

// Eight bytes that begin at a multiple of ALIGNED.
template <int ALIGNED>
struct eight_bytes;

template <>
struct eight_bytes<2> {
  ushort at[4];
  inline void fetch(const device uchar* p) {
    for (int i = 0; i < 4; ++i) {
      at[i] = ((const device ushort*)p)[i];
    }
  }
  inline uint word(int i) const { return uint(at[2 * i]) | uint(at[2 * i + 1]) << 16; }
};

template <>
struct eight_bytes<4> {
  uint at[2];
  inline void fetch(const device uchar* p) {
    at[0] = ((const device uint*)p)[0];
    at[1] = ((const device uint*)p)[1];
  }
  inline uint word(int i) const { return at[i]; }
};

template <>
struct eight_bytes<8> {
  pack<uint, 2> at;
  inline void fetch(const device uchar* p) { at = load_pack<2>((const device uint*)p); }
  inline uint word(int i) const { return at.at[i]; }
};

struct q4_0 {
  using lanes = lane_eights<16, 2, 1>;
  enum { ELEMENTS = 32, BYTES = 18, ZERO = 8, ADDS = 0 };
  uint head;
  eight_bytes<2> low;
  inline void fetch(const device uchar* block, uint at) {
    head = ushort_at(block);
    low.fetch(block + 2 + at % 16);
  }
  inline uint word(int i, uint at) const { return low.word(i) >> at / 16 * 4 & 0x0f0f0f0fu; }
  inline float scale(uint at) const { return half_of(head); }
  inline float added(uint at) const { return 0.0f; }
};

struct q4_1 {
  using lanes = lane_eights<16, 2, 1>;
  enum { ELEMENTS = 32, BYTES = 20, ZERO = 0, ADDS = 1 };
  uint head;
  eight_bytes<4> low;
  inline void fetch(const device uchar* block, uint at) {
    head = *(const device uint*)block;
    low.fetch(block + 4 + at % 16);
  }
  inline uint word(int i, uint at) const { return low.word(i) >> at / 16 * 4 & 0x0f0f0f0fu; }
  inline float scale(uint at) const { return half_of(head); }
  inline float added(uint at) const { return half_of(head >> 16); }
};

struct q5_0 {
  using lanes = lane_eights<16, 2, 1>;
  enum { ELEMENTS = 32, BYTES = 22, ZERO = 16, ADDS = 0 };
  uint head, fifth;
  eight_bytes<2> low;
  inline void fetch(const device uchar* block, uint at) {
    head = ushort_at(block);
    fifth = ushort_at(block + 2 + at / 16 * 2);
    low.fetch(block + 6 + at % 16);
  }
  inline uint word(int i, uint at) const {
    return (low.word(i) >> at / 16 * 4 & 0x0f0f0f0fu) | in_bytes(fifth >> (at % 16 + 4 * i)) << 4;
  }
  inline float scale(uint at) const { return half_of(head); }
  inline float added(uint at) const { return 0.0f; }
};

struct q5_1 {
  using lanes = lane_eights<16, 2, 1>;
  enum { ELEMENTS = 32, BYTES = 24, ZERO = 0, ADDS = 1 };
  // The second word is the fifth bits.
  pack<uint, 2> head;
  eight_bytes<8> low;
  inline void fetch(const device uchar* block, uint at) {
    head = load_pack<2>((const device uint*)block);
    low.fetch(block + 8 + at % 16);
  }
  inline uint word(int i, uint at) const {
    return (low.word(i) >> at / 16 * 4 & 0x0f0f0f0fu) | in_bytes(head.at[1] >> (at + 4 * i)) << 4;
  }
  inline float scale(uint at) const { return half_of(head.at[0]); }
  inline float added(uint at) const { return half_of(head.at[0] >> 16); }
};

struct q8_0 {
  using lanes = lane_eights<8, 1, 1>;
  enum { ELEMENTS = 32, BYTES = 34, ZERO = 128, ADDS = 0 };
  uint head;
  eight_bytes<2> bytes;
  inline void fetch(const device uchar* block, uint at) {
    head = ushort_at(block);
    bytes.fetch(block + 2 + at);
  }
  inline uint word(int i, uint at) const { return bytes.word(i) ^ 0x80808080u; }
  inline float scale(uint at) const { return half_of(head); }
  inline float added(uint at) const { return 0.0f; }
};

struct q2_k {
  using lanes = lane_eights<32, 4, 1>;
  enum { ELEMENTS = 256, BYTES = 84, ZERO = 0, ADDS = 1 };
  uint head, both;
  eight_bytes<4> low;
  inline void fetch(const device uchar* block, uint at) {
    head = *(const device uint*)(block + 80);
    both = block[at / 16];
    low.fetch(block + 16 + at / 128 * 32 + at % 32);
  }
  inline uint word(int i, uint at) const { return low.word(i) >> at % 128 / 32 * 2 & 0x03030303u; }
  inline float scale(uint at) const { return half_of(head) * small_number(both & 15); }
  inline float added(uint at) const { return -half_of(head >> 16) * small_number(both >> 4); }
};

struct q3_k {
  using lanes = lane_eights<32, 4, 1>;
  enum { ELEMENTS = 256, BYTES = 110, ZERO = 4, ADDS = 0 };
  uint head, fours, twos;
  eight_bytes<2> third, low;
  inline void fetch(const device uchar* block, uint at) {
    head = ushort_at(block + 108);
    fours = block[96 + at / 16 % 8];
    twos = block[104 + at / 16 % 4];
    third.fetch(block + at % 32);
    low.fetch(block + 32 + at / 128 * 32 + at % 32);
  }
  inline uint word(int i, uint at) const {
    return (low.word(i) >> at % 128 / 32 * 2 & 0x03030303u)
        | (third.word(i) >> at / 32 & 0x01010101u) << 2;
  }
  inline float scale(uint at) const {
    const uint bits = (fours >> at / 128 * 4 & 15) | (twos >> at / 64 * 2 & 3) << 4;
    return half_of(head) * small_number(bits, 32);
  }
  inline float added(uint at) const { return 0.0f; }
};

// The first 16 bytes of Q4_K and Q5_K: two halves, and 8 pairs of numbers of 6 bits.
struct six_bit_pairs {
  pack<uint, 4> words;
  inline void fetch(const device uchar* block) {
    words = load_pack<4>((const device uint*)block);
  }
  // The second of the pair comes with by = 1. Two neighbouring groups have the same `two`.
  inline float six_bits(uint group, int by) const {
    const uint shift = group / 2 % 2 * 16;
    const uint own = words.at[1 + by] >> shift, rest = words.at[3] >> (shift + 4 * by);
    const uint two = group < 4 ? own & 0x3f3f : (rest & 0x0f0f) | (own & 0xc0c0) >> 2;
    return small_number(two >> group % 2 * 8 & 255);
  }
  inline float scale(uint group) const { return half_of(words.at[0]) * six_bits(group, 0); }
  inline float added(uint group) const {
    return -half_of(words.at[0] >> 16) * six_bits(group, 1);
  }
};

struct q4_k {
  using lanes = lane_eights<32, 2, 2>;
  enum { ELEMENTS = 256, BYTES = 144, ZERO = 0, ADDS = 1 };
  six_bit_pairs pairs;
  eight_bytes<8> low;
  inline void fetch(const device uchar* block, uint at) {
    pairs.fetch(block);
    low.fetch(block + 16 + at / 64 * 32 + at % 32);
  }
  inline uint word(int i, uint at) const { return low.word(i) >> at % 64 / 32 * 4 & 0x0f0f0f0fu; }
  inline float scale(uint at) const { return pairs.scale(at / 32); }
  inline float added(uint at) const { return pairs.added(at / 32); }
};

struct q5_k {
  using lanes = lane_eights<32, 2, 2>;
  enum { ELEMENTS = 256, BYTES = 176, ZERO = 0, ADDS = 1 };
  six_bit_pairs pairs;
  eight_bytes<8> fifth, low;
  inline void fetch(const device uchar* block, uint at) {
    pairs.fetch(block);
    fifth.fetch(block + 16 + at % 32);
    low.fetch(block + 48 + at / 64 * 32 + at % 32);
  }
  inline uint word(int i, uint at) const {
    return (low.word(i) >> at % 64 / 32 * 4 & 0x0f0f0f0fu)
        | (fifth.word(i) >> at / 32 & 0x01010101u) << 4;
  }
  inline float scale(uint at) const { return pairs.scale(at / 32); }
  inline float added(uint at) const { return pairs.added(at / 32); }
};

struct q6_k {
  using lanes = lane_eights<64, 2, 1>;
  enum { ELEMENTS = 256, BYTES = 210, ZERO = 32, ADDS = 0 };
  uint head, factor;
  eight_bytes<2> low, high;
  inline void fetch(const device uchar* block, uint at) {
    head = ushort_at(block + 208);
    factor = block[192 + at / 16];
    low.fetch(block + at / 128 * 64 + at % 64);
    high.fetch(block + 128 + at / 128 * 32 + at % 32);
  }
  inline uint word(int i, uint at) const {
    const int left = 4 - int(at % 128 / 32 * 2);
    const uint two = at % 128 < 64 ? high.word(i) << left : high.word(i) >> -left;
    return (low.word(i) >> at % 128 / 64 * 4 & 0x0f0f0f0fu) | (two & 0x30303030u);
  }
  inline float scale(uint at) const {
    return half_of(head) * small_number(factor ^ 128, 128);
  }
  inline float added(uint at) const { return 0.0f; }
};

// What four bytes below 16 stand for in IQ4_NL and IQ4_XS, plus 128.
#ifndef MOEFLUX_CUDA
inline uint in_table(uint word) {
  uint found = 0;
  for (int i = 0; i < 32; i += 8) {
    const uint q = word >> i & 15;
    const uint lower = q & 4 ? 0x766a5d4fu : 0x3f2d1801u;
    const uint upper = q & 4 ? 0xf1d9c5b5u : 0xa6998d81u;
    found |= ((q & 8 ? upper : lower) >> q % 4 * 8 & 255) << i;
  }
  return found;
}
#endif

struct iq4_nl {
  using lanes = lane_eights<16, 2, 1>;
  enum { ELEMENTS = 32, BYTES = 18, ZERO = 128, ADDS = 0 };
  q4_0 plain;
  inline void fetch(const device uchar* block, uint at) { plain.fetch(block, at); }
  inline uint word(int i, uint at) const { return in_table(plain.word(i, at)); }
  inline float scale(uint at) const { return plain.scale(at); }
  inline float added(uint at) const { return 0.0f; }
};

struct iq4_xs {
  using lanes = lane_eights<16, 2, 1>;
  enum { ELEMENTS = 256, BYTES = 136, ZERO = 128, ADDS = 0 };
  pack<uint, 2> head;
  eight_bytes<8> low;
  inline void fetch(const device uchar* block, uint at) {
    head = load_pack<2>((const device uint*)block);
    low.fetch(block + 8 + at / 32 * 16 + at % 16);
  }
  inline uint word(int i, uint at) const {
    return in_table(low.word(i) >> at % 32 / 16 * 4 & 0x0f0f0f0fu);
  }
  inline float scale(uint at) const {
    const uint group = at / 32;
    const uint bits = (head.at[1] >> 4 * group & 15) | (head.at[0] >> (16 + 2 * group) & 3) << 4;
    return half_of(head.at[0]) * small_number(bits, 32);
  }
  inline float added(uint at) const { return 0.0f; }
};

// Copies bytes of page-locked memory in words as wide as both addresses allow. LOAD reads a word.

enum { WORDS_AT_ONCE = 4 };

typedef unsigned long long u64;
typedef unsigned char byte;

// A block of threads copies `nbytes`. Each thread begins several reads before it waits for one.
template <typename Word>
__device__ void copy_words(byte* to, const byte* from, u64 nbytes) {
  const Word* source = (const Word*)from;
  Word* target = (Word*)to;
  const u64 count = nbytes / sizeof(Word);
  for (u64 first = threadIdx.x; first < count; first += WORDS_AT_ONCE * blockDim.x) {
    Word words[WORDS_AT_ONCE];
#pragma unroll
    for (int i = 0; i < WORDS_AT_ONCE; i++) {
      const u64 at = first + i * blockDim.x;
      if (at < count) words[i] = LOAD(source + at);
    }
#pragma unroll
    for (int i = 0; i < WORDS_AT_ONCE; i++) {
      const u64 at = first + i * blockDim.x;
      if (at < count) target[at] = words[i];
    }
  }
  for (u64 i = count * sizeof(Word) + threadIdx.x; i < nbytes; i += blockDim.x) to[i] = LOAD(from + i);
}

__device__ void copy(byte* to, const byte* from, u64 nbytes) {
  switch (((u64)to | (u64)from) & 15) {
    case 0: copy_words<uint4>(to, from, nbytes); break;
    case 8: copy_words<uint2>(to, from, nbytes); break;
    case 4: case 12: copy_words<unsigned int>(to, from, nbytes); break;
    case 2: case 6: case 10: case 14: copy_words<unsigned short>(to, from, nbytes); break;
    default: copy_words<byte>(to, from, nbytes);
  }
}

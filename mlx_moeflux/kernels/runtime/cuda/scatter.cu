// Copies pieces of page-locked memory to where they belong in banks. The host passes the pieces as
// the kernel's argument, so that a launch needs no memory of its own; native_reads.c and upload.py
// declare the same struct. Threads read the host's memory over the bus in words as wide as both
// addresses allow.

enum { MOST_PIECES = 128, CHUNK = 16384, WORDS_AT_ONCE = 4 };

typedef unsigned long long u64;
typedef unsigned char byte;

struct Piece {
  u64 to, from, nbytes;
};

struct Pieces {
  u64 count;
  Piece piece[MOST_PIECES];
};

// A block of threads copies `nbytes`. Each thread begins several reads before it waits for one.
template <typename Word>
__device__ void copy(byte* to, const byte* from, u64 nbytes) {
  const Word* source = (const Word*)from;
  Word* target = (Word*)to;
  const u64 count = nbytes / sizeof(Word);
  for (u64 first = threadIdx.x; first < count; first += WORDS_AT_ONCE * blockDim.x) {
    Word words[WORDS_AT_ONCE];
#pragma unroll
    for (int i = 0; i < WORDS_AT_ONCE; i++) {
      const u64 at = first + i * blockDim.x;
      if (at < count) words[i] = source[at];
    }
#pragma unroll
    for (int i = 0; i < WORDS_AT_ONCE; i++) {
      const u64 at = first + i * blockDim.x;
      if (at < count) target[at] = words[i];
    }
  }
  for (u64 i = count * sizeof(Word) + threadIdx.x; i < nbytes; i += blockDim.x) to[i] = from[i];
}

// Blocks of threads take chunks in turn, over all pieces.
extern "C" __global__ void scatter(const __grid_constant__ Pieces pieces) {
  u64 chunk = blockIdx.x;
  for (u64 p = 0; p < pieces.count; p++) {
    const Piece& piece = pieces.piece[p];
    const u64 chunks = (piece.nbytes + CHUNK - 1) / CHUNK;
    for (; chunk < chunks; chunk += gridDim.x) {
      const u64 start = chunk * CHUNK, left = piece.nbytes - start;
      const u64 nbytes = left < CHUNK ? left : CHUNK;
      const u64 to = piece.to + start, from = piece.from + start;
      byte* target = (byte*)to;
      const byte* source = (const byte*)from;
      switch ((to | from) & 15) {
        case 0: copy<uint4>(target, source, nbytes); break;
        case 8: copy<uint2>(target, source, nbytes); break;
        case 4: case 12: copy<unsigned int>(target, source, nbytes); break;
        case 2: case 6: case 10: case 14: copy<unsigned short>(target, source, nbytes); break;
        default: copy<byte>(target, source, nbytes);
      }
    }
    chunk -= chunks;
  }
}

// Copies pieces of page-locked memory to where they belong in banks. The host passes the pieces as
// the kernel's argument, so that a launch needs no memory of its own; native_reads.c and upload.py
// declare the same struct. The text of copy.cuh stands before this one.

enum { MOST_PIECES = 128, CHUNK = 16384 };

struct Piece {
  u64 to, from, nbytes;
};

struct Pieces {
  u64 count;
  Piece piece[MOST_PIECES];
};

// Blocks of threads take chunks in turn, over all pieces.
extern "C" __global__ void scatter(const __grid_constant__ Pieces pieces) {
  u64 chunk = blockIdx.x;
  for (u64 p = 0; p < pieces.count; p++) {
    const Piece& piece = pieces.piece[p];
    const u64 chunks = (piece.nbytes + CHUNK - 1) / CHUNK;
    for (; chunk < chunks; chunk += gridDim.x) {
      const u64 start = chunk * CHUNK, left = piece.nbytes - start;
      const u64 nbytes = left < CHUNK ? left : CHUNK;
      copy((byte*)(piece.to + start), (const byte*)(piece.from + start), nbytes);
    }
    chunk -= chunks;
  }
}

// A kernel that waits for the host: it posts the experts of a token in one layer, takes the slots
// that the host answers, and copies the blocks that the host has read meanwhile. docs/handshake.md
// has the protocol; handshake.c is the other side. The text of copy.cuh stands before this one.

typedef volatile u64 word;

// Words in memory of the host: of all layers; of a layer, whose ids are at 0; of a piece.
enum { TURN, ABORT };
enum { ANSWER = 32, PIECES = 64 };
enum { TO, FROM, NBYTES, READY, PIECE_WORDS };
// Words of `control`: the addresses of these words, nanoseconds of the longest wait, and what the
// first block of threads tells the others.
enum { COMMON, BOX, LIMIT, RELAY };
// A word says its turn above so many bits.
enum { TAG = 16, LOOKS = 16 };

#ifdef __CUDACC__
__device__ u64 nanoseconds() {
  u64 time;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(time));
  return time;
}
#endif

// Returns the word once it is of this turn; 0 if the step is given up, or this wait gives it up.
__device__ u64 awaited(word* at, u64 turn, word* common, u64 limit) {
  const u64 start = nanoseconds();
  for (unsigned looks = 0;; looks++) {
    const u64 value = *at;
    if (value >> TAG == turn) return value;
    if (looks % LOOKS) continue;
    if (common[ABORT]) return 0;
    if (nanoseconds() - start > limit) {
      common[ABORT] = 1;
      return 0;
    }
  }
}

template <int K>
__device__ void pull(const unsigned* ids, u64* control, unsigned* slots) {
  __shared__ unsigned answer[ANSWER];
  __shared__ u64 to, from, nbytes, turn;
  word* common = (word*)control[COMMON];
  word* box = (word*)control[BOX];
  word* relay = (word*)control + RELAY;
  const u64 limit = control[LIMIT];
  const unsigned lane = threadIdx.x;
  if (lane < ANSWER) {
    const u64 now = common[TURN];
    if (lane == 0) turn = now;
    if (blockIdx.x == 0 && lane < K) {
      box[lane] = now << TAG | ids[lane];
      __threadfence_system();
    }
    if (lane <= K) {
      const u64 value = awaited(blockIdx.x ? relay + lane : box + ANSWER + lane, now, common, limit);
      if (blockIdx.x == 0) relay[lane] = value ? value : now << TAG;
      answer[lane] = value & ((1 << TAG) - 1);
    }
  }
  __syncthreads();
  if (blockIdx.x == 0 && lane < K) slots[lane] = answer[lane];
  for (unsigned i = blockIdx.x; i < answer[K]; i += gridDim.x) {
    if (lane == 0) {
      word* piece = box + PIECES + PIECE_WORDS * i;
      const u64 ready = awaited(piece + READY, turn, common, limit);
      __threadfence_system();
      to = piece[TO];
      from = piece[FROM];
      nbytes = ready ? piece[NBYTES] : 0;
    }
    __syncthreads();
    copy((byte*)to, (const byte*)from, nbytes);
    __syncthreads();
  }
}

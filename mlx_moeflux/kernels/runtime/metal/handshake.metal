// A kernel that waits for the host: it posts the experts of a token in one layer, and takes the slots
// that the host answers when their blocks are there. docs/handshake.md has the protocol; handshake.c
// is the other side, and writes the blocks into slots itself.
//
// A word has 64 bits in the host's memory, and is two of 32 here, the lower half first, because
// nothing says that 64 bits are stored at once.

// Words of the host: of all layers; of a layer, whose ids are at 0.
constant uint TURN = 0, ABORT = 1, ANSWER = 32;
// A word says its turn above so many bits.
constant uint TAG = 16, VALUE = 0xffff;

// Orders what both sides see. The scope of the system has a number alone.
inline void system_fence() {
  metal::atomic_thread_fence(
      mem_flags::mem_device, metal::memory_order_seq_cst, static_cast<metal::thread_scope>(3));
}

// Returns the value of the word once it has this tag and this upper half; 0 if the step is given up,
// or this wait gives it up after so many looks.
inline uint awaited(
    volatile coherent(system) device uint* at,
    uint tag,
    uint upper,
    volatile coherent(system) device uint* common,
    uint looks) {
  for (uint look = 0; look < looks; ++look) {
    system_fence();
    // The upper half is read first: if it is of this turn, so is the lower one, which then has the value.
    const uint high = at[1];
    const uint low = at[0];
    if (high == upper && (low & ~VALUE) == tag) return low & VALUE;
    if (common[2 * ABORT] != 0) return 0;
  }
  common[2 * ABORT] = 1;
  return 0;
}

// Returns the slot of `expert`, which is number `lane` of the token's. common, box: words of all
// layers, and of this one.
inline uint pull(
    uint expert,
    uint lane,
    volatile coherent(system) device uint* common,
    volatile coherent(system) device uint* box,
    uint looks) {
  const uint low = common[2 * TURN], high = common[2 * TURN + 1];
  const uint tag = low << TAG, upper = high << TAG | low >> (32 - TAG);
  // The upper half is written last, as the host takes the word when it is of this turn.
  box[2 * lane] = tag | expert;
  system_fence();
  box[2 * lane + 1] = upper;
  system_fence();
  // No thread waits before all ids are posted.
  threadgroup_barrier(mem_flags::mem_none);
  const uint slot = awaited(box + 2 * (ANSWER + lane), tag, upper, common, looks);
  system_fence();
  return slot;
}

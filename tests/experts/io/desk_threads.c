/* handshake.c under ThreadSanitizer. This thread plays the kernels; some steps it aborts, and in some
   reads fail. With an argument threads write slots, as on Apple's GPUs. cc -fsanitize=thread -pthread -I FOLDER_OF_HANDSHAKE_C desk_threads.c -lm */

#include "handshake.c"
#include <fcntl.h>
#include <stdio.h>

enum { EXPERTS = 16, LAYERS = 3, COMPONENTS = 3, SLOTS = 6, K = 4, SIZE = 4096, STEPS = 1500, CHUNK = 512 };
enum { PARTS = K * COMPONENTS * 9, BOX = PIECES + PIECE_WORDS * PARTS };

static uint8_t data[EXPERTS * COMPONENTS * SIZE], banks[LAYERS][COMPONENTS][SLOTS * SIZE];
static uint8_t staging[PARTS * CHUNK] __attribute__((aligned(64)));
static uint64_t common[2], boxes[LAYERS][BOX];
static int32_t where[EXPERTS * COMPONENTS], slot_of[LAYERS][EXPERTS], expert_of[LAYERS][SLOTS], order = -1;
static int64_t offsets[EXPERTS * COMPONENTS], since[LAYERS][SLOTS], addresses[LAYERS][COMPONENTS];
static int64_t sizes[COMPONENTS] = {SIZE, 256, 1008};
static double scores[LAYERS][EXPERTS];
static Counts counts[LAYERS];
static Layer places[LAYERS];
static Shelf shelves[LAYERS];

static uint64_t awaited(uint64_t *word, uint64_t turn) {
  while (GET(word) >> TAG != turn) {
    if (GET(&common[ABORT])) return 0;
    sched_yield();
  }
  return GET(word);
}

int main(int count, char **arguments) {
  int pulled = count == 1;
  char name[] = "/tmp/desk_threadsXXXXXX";
  int fd = mkstemp(name), broken = open("/proc/self/mem", O_RDONLY);
  long compared = 0, differ = 0, failed = 0;
  srand(1);
  for (size_t i = 0; i < sizeof data; i++) data[i] = rand();
  if (write(fd, data, sizeof data) != sizeof data) return 1;
  struct stat known;
  stat(name, &known);
  File file = {name, known.st_dev, known.st_ino, known.st_size, known.st_mtim.tv_sec, known.st_mtim.tv_nsec, fd};
  for (int i = 0; i < EXPERTS * COMPONENTS; i++) offsets[i] = (int64_t)i * SIZE;
  memset(slot_of, -1, sizeof slot_of);
  memset(expert_of, -1, sizeof expert_of);
  for (int i = 0; i < LAYERS; i++) {
    for (int c = 0; c < COMPONENTS; c++) addresses[i][c] = (int64_t)banks[i][c];
    places[i] = (Layer){&file, where, offsets, sizes, addresses[i], &order, NULL, COMPONENTS};
    shelves[i] = (Shelf){&places[i], boxes[i], slot_of[i], expert_of[i], scores[i], since[i], &counts[i],
                         SLOTS, EXPERTS, 0, 0};
  }
  Plan plan = {shelves, common, pulled ? staging : NULL, pulled, LAYERS, K, 1, CHUNK, CHUNK, PARTS, 4, 1.0 / 32};
  Desk *desk;
  desk_open(&desk, &plan);
  for (int step = 1; step <= STEPS; step++) {
    if (step % 100 == 0) usleep(8000); /* the threads doze */
    int aborts = step % 61 == 0, fails = step % 127 == 0;
    if (fails) file.fd = broken;
    desk_begin(desk);
    uint64_t turn = common[TURN];
    for (int i = 0; i < LAYERS; i++) {
      int64_t ids[K];
      for (int k = 0, e = -1; k < K; k++) PUT(&boxes[i][k], turn << TAG | (ids[k] = e += 1 + rand() % 3));
      if (aborts && i == 1) desk_abort(desk);
      uint64_t slots[K];
      for (int k = 0; k < K; k++) slots[k] = awaited(&boxes[i][ANSWER + k], turn) & 0xffff;
      int pieces = awaited(&boxes[i][ANSWER + K], turn) & 0xffff;
      for (int p = 0; p < pieces; p++) {
        uint64_t *piece = &boxes[i][PIECES + PIECE_WORDS * p];
        if (awaited(&piece[READY], turn)) memcpy((void *)piece[TO], (void *)piece[FROM], piece[NBYTES]);
      }
      if (GET(&common[ABORT])) break;
      for (int k = 0; k < K; k++)
        for (int c = 0; c < COMPONENTS; c++, compared++)
          differ += memcmp(banks[i][c] + slots[k] * sizes[c], data + offsets[ids[k] * COMPONENTS + c], sizes[c]) != 0;
    }
    while (!desk_ended(desk, 1000000)) {}
    Failure failure;
    if (!desk_failure(desk, &failure)) continue;
    failed++;
    if (failure.outcome.error != (fails ? EIO : 0)) return 2;
    /* Slots of this step may be incomplete. */
    desk_close(&desk);
    file.fd = fd;
    for (int i = 0; i < LAYERS; i++)
      for (int s = 0; s < SLOTS; s++)
        if (expert_of[i][s] >= 0 && since[i][s] == (int64_t)turn) slot_of[i][expert_of[i][s]] = -1, expert_of[i][s] = -1;
    desk_open(&desk, &plan);
    if (!desk) return 3;
  }
  desk_close(&desk);
  unlink(name);
  printf("%ld compared, %ld differ, %ld steps failed\n", compared, differ, failed);
  return differ != 0;
}

/* Threads that read blocks of experts from files into memory. POSIX and C11; no Python, no MLX.
   native_pool.py calls these functions and owns all memory that they get. A layer says where its
   blocks and slots lie, a batch reads some blocks into slots, the threads take parts of blocks. */

#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__ARM_FEATURE_CRC32)
#include <arm_acle.h>
#endif
#ifdef __APPLE__
#define st_mtim st_mtimespec
#endif

enum { MOST_COMPONENTS = 16, MOST_PIECES = 128, SECOND = 1000000000, PAGE = 4096, SECTOR = 512 };
enum { ENDS_EARLY = -1, REFUSED = -2, WRONG = -3, CHANGED = -4 };

/* An open file, and what the system knew of its path then. */
typedef struct {
  const char *path;
  int64_t device, inode, size, seconds, nanoseconds;
  int32_t fd;
} File;

/* Blocks of a layer. where, offsets: a row of components for each expert; `where` has indices of
   files, or -1 for none. A slot has its components at addresses + slot * sizes. order: of components
   without gaps; -1 if there are gaps. checksums: CRC-32 of each expert's block, or NULL. */
typedef struct {
  const File *files;
  const int32_t *where;
  const int64_t *offsets, *sizes, *addresses;
  const int32_t *order;
  const uint32_t *checksums;
  int64_t components;
} Layer;

/* What becomes of a block. error: 0, an errno, or one of the above, after `done` of `wanted` bytes at
   `offset` of `file`. rest: the checksum less that of the parts that were read; in the end 0.
   elapsed: nanoseconds from the begin of the batch to the end of the part that ended last. */
typedef struct {
  int64_t nbytes, nanoseconds, elapsed, offset, wanted, done;
  int32_t file, error;
  uint32_t rest;
} Outcome;

/* What a launch of the kernel in scatter.cu copies; it declares the same. */
typedef struct {
  uint64_t count;
  struct {
    uint64_t to, from, nbytes;
  } piece[MOST_PIECES];
} Pieces;

/* Functions of a GPU's driver, for slots that the host does not write; else NULL. kernel: that copies
   pieces, in `blocks` of `threads`. */
typedef struct {
  int (*enter)(void *context);
  int (*launch)(void *kernel, unsigned blocks, unsigned, unsigned, unsigned threads, unsigned, unsigned,
                unsigned memory, void *stream, void **arguments, void **extra);
  int (*finish)(void *stream);
  void *context, *stream, *kernel;
  uint32_t blocks, threads;
} Device;

/* What reads: a thread of the pool, or the caller. memory: its buffer, or NULL. used: bytes of it.
   waiting: parts in it that the device does not copy yet. */
typedef struct {
  struct Pool *pool;
  uint8_t *memory;
  int64_t used, waiting;
  pthread_t thread;
} Hand;

/* Blocks that are read together. count, ended: parts in all, and those that have ended. begun: when,
   in nanoseconds. urgent: its parts are read before those of other batches. */
typedef struct Batch Batch;

/* Consecutive bytes of a file and the pieces of memory that they go to. from: where they are in the
   buffer of `hand`. before, after: the bytes of the block around them. */
typedef struct Part {
  Batch *batch;
  struct Part *following;
  Hand *hand;
  uint8_t *from, *into[MOST_COMPONENTS];
  int64_t sizes[MOST_COMPONENTS], block, offset, nbytes, before, after;
  int file, pieces;
} Part;

struct Batch {
  const Layer *layer;
  Outcome *outcomes;
  int64_t count, ended, block_bytes, begun;
  int urgent;
  Part parts[];
};

typedef struct Pool {
  pthread_mutex_t lock;
  pthread_cond_t work, ended, copied;
  Part *first, **end; /* to read */
  Part *read;         /* for the device to copy */
  Device device;
  int64_t alignment, least_piece, buffer_bytes;
  int count, closing, copying;
  Hand hands[]; /* the threads', and the caller's */
} Pool;

static int64_t now(clockid_t clock) {
  struct timespec t;
  clock_gettime(clock, &t);
  return (int64_t)t.tv_sec * SECOND + t.tv_nsec;
}
static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
static int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

/* CRC-32 as in zlib and PNG. A number stands for a polynomial over two elements modulo
   x^32 + POLYNOMIAL; bit i is the coefficient of x^(31 - i). */
#define POLYNOMIAL 0xEDB88320u
#define ONE 0x80000000u

static uint32_t times(uint32_t a, uint32_t b) {
  uint32_t product = 0;
  for (; a; a <<= 1) {
    if (a & ONE) product ^= b;
    b = b >> 1 ^ (b & 1 ? POLYNOMIAL : 0);
  }
  return product;
}

/* x^n. */
static uint32_t power(int64_t n) {
  uint32_t result = ONE;
  for (uint32_t square = ONE >> 1; n; n >>= 1, square = times(square, square))
    if (n & 1) result = times(result, square);
  return result;
}

/* The remainder of `n` bytes that follow those of the remainder `crc`. */
static uint32_t bytewise(uint32_t crc, const uint8_t *data, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    crc ^= data[i];
    for (int bit = 0; bit < 8; bit++) crc = crc >> 1 ^ (crc & 1 ? POLYNOMIAL : 0);
  }
  return crc;
}

#if defined(__x86_64__)
/* Multiply 16 bytes, the first of which have the highest powers, by the power of `by`. */
__attribute__((target("pclmul"))) static inline __m128i folded(__m128i data, __m128i by) {
  return _mm_xor_si128(_mm_clmulepi64_si128(data, by, 0x00), _mm_clmulepi64_si128(data, by, 0x11));
}

enum { LANES = 8, STEP = 16 * LANES, WIDE_LANES = 8, WIDE_STEP = 64 * WIDE_LANES };

/* Multipliers of both halves of 16 bytes that move them on by a step of all lanes, or by one lane. A
   product of two reversed numbers is one bit too low, hence the -1. */
static uint64_t by_step[2], by_lane[2], by_wide_step[2];
static int has_products, has_wide_products;

__attribute__((constructor)) static void prepare(void) {
  for (int half = 0; half < 2; half++) {
    by_step[half] = (uint64_t)power(8 * STEP - 1 + 64 * !half) << 32;
    by_lane[half] = (uint64_t)power(128 - 1 + 64 * !half) << 32;
    by_wide_step[half] = (uint64_t)power(8 * WIDE_STEP - 1 + 64 * !half) << 32;
  }
  __builtin_cpu_init();
  has_products = __builtin_cpu_supports("pclmul");
  has_wide_products = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq");
}

__attribute__((target("pclmul"))) static uint32_t narrow(uint32_t crc, const uint8_t *data, int64_t n) {
  if (n < STEP) return bytewise(crc, data, n);
  __m128i lanes[LANES], by = _mm_loadu_si128((const __m128i *)by_step);
  for (int i = 0; i < LANES; i++) lanes[i] = _mm_loadu_si128((const __m128i *)data + i);
  lanes[0] = _mm_xor_si128(lanes[0], _mm_cvtsi32_si128((int)crc));
  for (data += STEP, n -= STEP; n >= STEP; data += STEP, n -= STEP)
    for (int i = 0; i < LANES; i++)
      lanes[i] = _mm_xor_si128(folded(lanes[i], by), _mm_loadu_si128((const __m128i *)data + i));
  __m128i last = lanes[0];
  by = _mm_loadu_si128((const __m128i *)by_lane);
  for (int i = 1; i < LANES; i++) last = _mm_xor_si128(folded(last, by), lanes[i]);
  for (; n >= 16; data += 16, n -= 16)
    last = _mm_xor_si128(folded(last, by), _mm_loadu_si128((const __m128i *)data));
  uint8_t bytes[16];
  _mm_storeu_si128((__m128i *)bytes, last);
  return bytewise(bytewise(0, bytes, sizeof bytes), data, n);
}

/* The same with four products an instruction. */
__attribute__((target("avx512f,vpclmulqdq"))) static uint32_t wide(uint32_t crc, const uint8_t *data,
                                                                   int64_t n) {
  __m512i lanes[WIDE_LANES], by = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)by_wide_step));
  for (int i = 0; i < WIDE_LANES; i++) lanes[i] = _mm512_loadu_si512(data + 64 * i);
  lanes[0] = _mm512_xor_si512(lanes[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)crc)));
  for (data += WIDE_STEP, n -= WIDE_STEP; n >= WIDE_STEP; data += WIDE_STEP, n -= WIDE_STEP)
    for (int i = 0; i < WIDE_LANES; i++) {
      __m512i low = _mm512_clmulepi64_epi128(lanes[i], by, 0x00);
      __m512i high = _mm512_clmulepi64_epi128(lanes[i], by, 0x11);
      low = _mm512_xor_si512(low, _mm512_loadu_si512(data + 64 * i));
      lanes[i] = _mm512_xor_si512(low, high);
    }
  uint8_t bytes[WIDE_STEP];
  for (int i = 0; i < WIDE_LANES; i++) _mm512_storeu_si512(bytes + 64 * i, lanes[i]);
  return narrow(narrow(0, bytes, sizeof bytes), data, n);
}

static uint32_t fast(uint32_t crc, const uint8_t *data, int64_t n) {
  if (has_wide_products && n >= 2 * WIDE_STEP) return wide(crc, data, n);
  return has_products ? narrow(crc, data, n) : bytewise(crc, data, n);
}
#elif defined(__ARM_FEATURE_CRC32)
/* Three thirds at a time: an instruction takes three cycles, and each cycle can begin one. */
static uint32_t fast(uint32_t crc, const uint8_t *data, int64_t n) {
  int64_t third = n / 24 * 8;
  uint32_t second = 0, last = 0;
  for (int64_t i = 0; i < third; i += 8) {
    uint64_t words[3];
    for (int j = 0; j < 3; j++) memcpy(&words[j], data + j * third + i, 8);
    crc = __crc32d(crc, words[0]);
    second = __crc32d(second, words[1]);
    last = __crc32d(last, words[2]);
  }
  uint32_t by = power(8 * third);
  crc = times(times(crc, by) ^ second, by) ^ last;
  return bytewise(crc, data + 3 * third, n - 3 * third);
}
#else
static uint32_t fast(uint32_t crc, const uint8_t *data, int64_t n) { return bytewise(crc, data, n); }
#endif

/* The checksum of `n` bytes that follow those of the checksum `crc`; 0 for none. */
uint32_t checksum(uint32_t crc, const uint8_t *data, int64_t n) { return ~fast(~crc, data, n); }

/* The share that a part of a block has in the block's checksum. */
static uint32_t share(const Part *part) {
  uint32_t crc = part->before ? 0 : ~0u;
  const uint8_t *from = part->from;
  for (int i = 0; i < part->pieces; i++) {
    crc = fast(crc, from ? from : part->into[i], part->sizes[i]);
    if (from) from += part->sizes[i];
  }
  return part->after ? times(crc, power(8 * part->after)) : ~crc;
}

/* Read at `offset`, at least `needed` of up to `room` bytes; `got` counts them, also before an error.
   A short read goes on at the last aligned offset. */
static int fill(int fd, uint8_t *into, int64_t offset, int64_t room, int64_t needed, int64_t align,
                int64_t *got) {
  for (*got = 0; *got < needed;) {
    int64_t again = *got - *got % align, n;
    do n = pread(fd, into + again, room - again, offset + again);
    while (n < 0 && errno == EINTR);
    if (n < 0) return errno;
    if (again + n <= *got) return ENDS_EARLY;
    *got = again + n;
  }
  return 0;
}

/* Read a part straight into its memory. */
static int read_straight(Part *part, int fd, int64_t *done) {
  for (int i = 0; i < part->pieces; i++) {
    int64_t size = part->sizes[i], got;
    int error = fill(fd, part->into[i], part->offset + *done, size, size, 1, &got);
    *done += got;
    if (error) return error;
  }
  return 0;
}

/* Copy a part from a buffer to where it belongs. */
static void scatter(const Part *part) {
  const uint8_t *from = part->from;
  for (int i = 0; i < part->pieces; from += part->sizes[i++]) memcpy(part->into[i], from, part->sizes[i]);
}

/* Begin to copy pieces, and empty the list of them. */
static int launch(const Device *device, Pieces *pieces) {
  void *arguments[] = {pieces};
  int refused = device->launch(device->kernel, device->blocks, 1, 1, device->threads, 1, 1, 0,
                               device->stream, arguments, NULL);
  pieces->count = 0;
  return refused ? REFUSED : 0;
}

/* Let the device copy parts from buffers to where they belong, as many as there are with one launch. */
static int send(const Device *device, const Part *part) {
  Pieces pieces = {0};
  for (; part; part = part->following) {
    const uint8_t *from = part->from;
    for (int i = 0; i < part->pieces; from += part->sizes[i++]) {
      if (pieces.count == MOST_PIECES && launch(device, &pieces)) return REFUSED;
      pieces.piece[pieces.count].to = (uint64_t)part->into[i];
      pieces.piece[pieces.count].from = (uint64_t)from;
      pieces.piece[pieces.count++].nbytes = part->sizes[i];
    }
  }
  return launch(device, &pieces);
}

/* Make room for `nbytes` in the buffer, once the device has copied what is there. */
static int make_room(Hand *hand, int64_t nbytes) {
  Pool *pool = hand->pool;
  if (!hand->used || hand->used + nbytes <= pool->buffer_bytes) return 0;
  pthread_mutex_lock(&pool->lock);
  while (hand->waiting) pthread_cond_wait(&pool->copied, &pool->lock);
  pthread_mutex_unlock(&pool->lock);
  hand->used = 0;
  return pool->device.enter(pool->device.context) || pool->device.finish(pool->device.stream);
}

/* Read a part to `at`, from an aligned offset on and in an aligned length. */
static int read_aligned(Part *part, int fd, uint8_t *at, int64_t alignment, int64_t *done) {
  int64_t before = part->offset % alignment, needed = before + part->nbytes, got;
  int error = fill(fd, at, part->offset - before, up(needed, alignment), needed,
                   alignment > 1 ? SECTOR : 1, &got);
  *done = larger(0, smaller(got, needed) - before);
  part->from = at + before;
  return error;
}

/* Read a part through the hand's buffer. What a device is to copy stays there. */
static int read_through(Hand *hand, Part *part, int fd, int64_t *done) {
  const Pool *pool = hand->pool;
  int64_t room = up(part->offset % pool->alignment + part->nbytes, pool->alignment);
  if (make_room(hand, room)) return REFUSED;
  int error = read_aligned(part, fd, hand->memory + hand->used, pool->alignment, done);
  if (pool->device.launch) hand->used += up(room, PAGE);
  else if (!error) scatter(part);
  return error;
}

/* Note that a part has ended; the lock is held. */
static void end_part(Pool *pool, Part *part, int64_t done, int error) {
  Batch *batch = part->batch;
  Outcome *outcome = &batch->outcomes[part->block];
  outcome->nbytes += done;
  if (error && !outcome->error)
    *outcome = (Outcome){.offset = part->offset, .wanted = part->nbytes, .done = done,
                         .file = part->file, .error = error};
  if (!outcome->error && outcome->nbytes == batch->block_bytes && outcome->rest) outcome->error = WRONG;
  outcome->elapsed = now(CLOCK_MONOTONIC) - batch->begun;
  if (++batch->ended == batch->count) pthread_cond_broadcast(&pool->ended);
}

/* Let the device copy what was read; the lock is held. One hand at a time does so, while the others
   read on: in a driver that several threads call they wait for one another. */
static void copy_parts(Pool *pool) {
  const Device *device = &pool->device;
  if (pool->copying) return;
  pool->copying = 1;
  for (Part *parts; (parts = pool->read);) {
    pool->read = NULL;
    pthread_mutex_unlock(&pool->lock);
    int error = device->enter(device->context) ? REFUSED : send(device, parts);
    pthread_mutex_lock(&pool->lock);
    for (Part *part = parts, *following; part; part = following) {
      following = part->following; /* the batch may end, and with it its memory */
      if (!--part->hand->waiting) pthread_cond_broadcast(&pool->copied);
      end_part(pool, part, error ? 0 : part->nbytes, error);
    }
  }
  pool->copying = 0;
}

/* Read a part; the lock is not held. */
static void read_part(Hand *hand, Part *part) {
  Pool *pool = hand->pool;
  int64_t start = now(CLOCK_MONOTONIC), done = 0;
  int error = 0, no_file = part->file < 0; /* to measure what remains */
  const Layer *layer = part->batch->layer;
  uint32_t sum = 0;
  if (no_file) {
    done = part->nbytes;
  } else {
    int fd = layer->files[part->file].fd;
    error = hand->memory ? read_through(hand, part, fd, &done) : read_straight(part, fd, &done);
    if (layer->checksums && !error) sum = share(part);
  }
  int64_t nanoseconds = now(CLOCK_MONOTONIC) - start;
  pthread_mutex_lock(&pool->lock);
  part->batch->outcomes[part->block].nanoseconds += nanoseconds;
  part->batch->outcomes[part->block].rest ^= sum;
  if (error || no_file || !pool->device.launch) {
    end_part(pool, part, done, error);
  } else {
    hand->waiting++;
    part->hand = hand;
    part->following = pool->read;
    pool->read = part;
    copy_parts(pool);
  }
  pthread_mutex_unlock(&pool->lock);
}

/* Take the next part, of `batch` unless that is NULL; the lock is held. */
static Part *take(Pool *pool, const Batch *batch) {
  Part **at = &pool->first;
  while (*at && batch && (*at)->batch != batch) at = &(*at)->following;
  Part *part = *at;
  if (part && !(*at = part->following)) pool->end = at;
  return part;
}

static void *work(void *argument) {
  Hand *hand = argument;
  Pool *pool = hand->pool;
  pthread_mutex_lock(&pool->lock);
  for (;;) {
    while (!pool->first && !pool->closing) pthread_cond_wait(&pool->work, &pool->lock);
    Part *part = take(pool, NULL);
    if (!part) break;
    if (pool->first) pthread_cond_signal(&pool->work); /* each thread wakes the next */
    pthread_mutex_unlock(&pool->lock);
    read_part(hand, part);
    pthread_mutex_lock(&pool->lock);
  }
  pthread_mutex_unlock(&pool->lock);
  return NULL;
}

/* Wait for the threads to end what they read, and free the pool. */
void pool_close(Pool *pool) {
  pthread_mutex_lock(&pool->lock);
  pool->closing = 1;
  pthread_cond_broadcast(&pool->work);
  pthread_mutex_unlock(&pool->lock);
  for (int i = 0; i < pool->count; i++) pthread_join(pool->hands[i].thread, NULL);
  free(pool);
}

/* Begin `count` threads. memory: buffers of buffer_bytes for them and the caller, or NULL to read
   straight into slots. least_piece: bytes that are worth a read. Return NULL without threads. */
Pool *pool_open(int count, int64_t alignment, int64_t least_piece, int64_t buffer_bytes,
                uint8_t *memory, const Device *device) {
  Pool *pool = calloc(1, sizeof *pool + (count + 1) * sizeof *pool->hands);
  if (!pool) return NULL;
  *pool = (Pool){.alignment = alignment, .least_piece = least_piece, .buffer_bytes = buffer_bytes};
  pthread_mutex_init(&pool->lock, NULL);
  pthread_cond_init(&pool->work, NULL);
  pthread_cond_init(&pool->ended, NULL);
  pthread_cond_init(&pool->copied, NULL);
  if (device) pool->device = *device;
  pool->end = &pool->first;
  for (int i = 0; i <= count; i++) {
    Hand *hand = &pool->hands[i];
    *hand = (Hand){.pool = pool, .memory = memory ? memory + i * buffer_bytes : NULL};
    if (i == count) return pool;
    if (pthread_create(&hand->thread, NULL, work, hand)) break;
    pool->count++;
  }
  pool_close(pool);
  return NULL;
}

static int64_t block_bytes(const Layer *layer) {
  int64_t total = 0;
  for (int64_t i = 0; i < layer->components; i++) total += layer->sizes[i];
  return total;
}

/* The bytes of a part, so that all threads have one of `count` blocks and it fits in a buffer. */
static int64_t step_of(const Pool *pool, const Layer *layer, int64_t count) {
  int64_t total = block_bytes(layer), cuts = (pool->count + count - 1) / count;
  int64_t step = up(total, cuts) / cuts;
  if (step < pool->least_piece) step = smaller(total, pool->least_piece);
  if (step >= 8 * PAGE) step = up(step, PAGE);
  return pool->buffer_bytes ? smaller(step, pool->buffer_bytes - 2 * PAGE) : step;
}

/* Add the parts of a block: of all its bytes if they are contiguous, else of each component. */
static void cut(Batch *batch, const Layer *layer, int64_t block, int64_t expert, int64_t slot,
                int64_t step) {
  int contiguous = layer->order[0] >= 0;
  int64_t position = 0, read = 0, row = expert * layer->components;
  for (int64_t i = 0; i < layer->components; i++) {
    int64_t c = contiguous ? layer->order[i] : i, size = layer->sizes[c], nbytes;
    uint8_t *to = (uint8_t *)layer->addresses[c] + slot * size;
    if (!contiguous) position = 0;
    for (int64_t done = 0; done < size; done += nbytes, position += nbytes) {
      if (position % step == 0)
        batch->parts[batch->count++] = (Part){.batch = batch, .block = block,
            .offset = layer->offsets[row + c] + done, .file = layer->where[row + c],
            .before = read, .after = batch->block_bytes - read};
      Part *part = &batch->parts[batch->count - 1];
      nbytes = smaller(step - position % step, size - done);
      part->into[part->pieces] = to + done;
      part->sizes[part->pieces++] = nbytes;
      part->nbytes += nbytes;
      part->after -= nbytes;
      read += nbytes;
    }
  }
}

/* The bytes that a batch of `count` blocks takes. */
int64_t batch_bytes(const Pool *pool, const Layer *layer, int64_t count) {
  int64_t parts = 0, step = step_of(pool, layer, count);
  for (int64_t i = 0; i < layer->components; i++) parts += layer->sizes[i] / step + 1;
  return sizeof(Batch) + count * parts * sizeof(Part);
}

/* Begin to read `count` blocks, at least one: an expert and its slot each. batch: memory of
   batch_bytes; it and `outcomes` live until all has ended. urgent: before batches that are not.
   wake: let threads read; otherwise batch_wait does. */
void batch_begin(Pool *pool, Batch *batch, const Layer *layer, int64_t count,
                 const int64_t (*blocks)[2], Outcome *outcomes, int urgent, int wake) {
  *batch = (Batch){.layer = layer, .outcomes = outcomes, .block_bytes = block_bytes(layer),
                   .begun = now(CLOCK_MONOTONIC), .urgent = urgent};
  for (int64_t i = 0, step = step_of(pool, layer, count); i < count; i++) {
    if (layer->checksums && layer->where[0] >= 0) outcomes[i].rest = layer->checksums[blocks[i][0]];
    cut(batch, layer, i, blocks[i][0], blocks[i][1], step);
  }
  pthread_mutex_lock(&pool->lock);
  Part **at = urgent ? &pool->first : pool->end;
  while (*at && (*at)->batch->urgent) at = &(*at)->following;
  Part *rest = *at;
  for (int64_t i = 0; i < batch->count; i++) {
    *at = &batch->parts[i];
    at = &batch->parts[i].following;
  }
  if (!(*at = rest)) pool->end = at;
  if (wake) pthread_cond_signal(&pool->work);
  pthread_mutex_unlock(&pool->lock);
}

/* Let no further part begin. */
void batch_abandon(Pool *pool, Batch *batch) {
  pthread_mutex_lock(&pool->lock);
  pool->end = &pool->first;
  for (Part *part; (part = *pool->end);) {
    if (part->batch != batch) {
      pool->end = &part->following;
    } else {
      *pool->end = part->following;
      batch->ended++;
    }
  }
  pthread_mutex_unlock(&pool->lock);
}

static int is_changed(const File *file) {
  struct stat now;
  return stat(file->path, &now) || (int64_t)now.st_dev != file->device ||
         (int64_t)now.st_ino != file->inode || now.st_size != file->size ||
         now.st_mtim.tv_sec != file->seconds || now.st_mtim.tv_nsec != file->nanoseconds;
}

/* Look whether the files of a batch that has ended are still those that were opened. */
static void check_files(Batch *batch) {
  for (int64_t i = 0, changed = 0; i < batch->count; i++) {
    const Part *part = &batch->parts[i];
    if (part->file < 0) continue;
    if (!i || part->file != part[-1].file) changed = is_changed(&batch->layer->files[part->file]);
    Outcome *outcome = &batch->outcomes[part->block];
    if (changed && (!outcome->error || outcome->error == WRONG)) {
      outcome->file = part->file;
      outcome->error = CHANGED;
    }
  }
}

/* Read one part of `batch` if one is left, else wait, at most `nanoseconds`. Return 1 once all have
   ended. */
int batch_wait(Pool *pool, Batch *batch, int64_t nanoseconds) {
  nanoseconds += now(CLOCK_REALTIME);
  struct timespec until = {nanoseconds / SECOND, nanoseconds % SECOND};
  pthread_mutex_lock(&pool->lock);
  Part *part = take(pool, batch);
  if (part) {
    pthread_mutex_unlock(&pool->lock);
    read_part(&pool->hands[pool->count], part);
    pthread_mutex_lock(&pool->lock);
  } else if (batch->ended < batch->count) {
    pthread_cond_timedwait(&pool->ended, &pool->lock, &until);
  }
  int over = batch->ended == batch->count;
  pthread_mutex_unlock(&pool->lock);
  if (over) check_files(batch);
  return over;
}

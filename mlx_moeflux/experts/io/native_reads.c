/* Threads that read blocks of experts from files into memory. POSIX and C11; no Python, no MLX.
   native_pool.py calls these functions and owns all memory that they get. A layer says where its
   blocks and slots lie, a batch reads some blocks into slots, the threads take parts of blocks. */

#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { MOST_COMPONENTS = 16, ENDS_EARLY = -1, REFUSED = -2, SECOND = 1000000000, PAGE = 4096 };

/* Blocks of a layer. fds, offsets: a row of components for each expert. A slot has its components at
   addresses + slot * sizes. order: of components without gaps; -1 if there are gaps. */
typedef struct {
  const int32_t *fds;
  const int64_t *offsets, *sizes, *addresses;
  const int32_t *order;
  int64_t components;
} Layer;

/* What becomes of a block. error: 0, an errno, ENDS_EARLY, or REFUSED by the device, after `done`
   of `wanted` bytes at `offset` of `fd`. */
typedef struct {
  int64_t nbytes, nanoseconds, offset, wanted, done;
  int32_t fd, error;
} Outcome;

/* Functions of a GPU's driver, for slots that the host does not write; else NULL. */
typedef struct {
  int (*enter)(void *context);
  int (*copy)(uint64_t to, const void *from, size_t nbytes, void *stream);
  int (*finish)(void *stream);
  void *context, *stream;
} Device;

/* What reads: a thread of the pool, or the caller. memory: its buffer, or NULL. used: bytes of it.
   waiting: parts in it that the device does not copy yet. */
typedef struct {
  struct Pool *pool;
  uint8_t *memory;
  int64_t used, waiting;
  pthread_t thread;
} Hand;

/* Blocks that are read together. count, ended: parts in all, and those that have ended. */
typedef struct Batch Batch;

/* Consecutive bytes of a file and the pieces of memory that they go to. from: where they are in the
   buffer of `hand`. */
typedef struct Part {
  Batch *batch;
  struct Part *following;
  Hand *hand;
  uint8_t *from, *into[MOST_COMPONENTS];
  int64_t sizes[MOST_COMPONENTS], block, offset, nbytes;
  int fd, pieces;
} Part;

struct Batch {
  Outcome *outcomes;
  int64_t count, ended;
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
static int read_straight(Part *part, int64_t *done) {
  for (int i = 0; i < part->pieces; i++) {
    int64_t size = part->sizes[i], got;
    int error = fill(part->fd, part->into[i], part->offset + *done, size, size, 1, &got);
    *done += got;
    if (error) return error;
  }
  return 0;
}

/* Copy a part from a buffer to where it belongs. */
static int scatter(const Device *device, Part *part) {
  uint8_t *from = part->from;
  for (int i = 0; i < part->pieces; from += part->sizes[i++]) {
    uint8_t *to = part->into[i];
    if (!device->copy) memcpy(to, from, part->sizes[i]);
    else if (device->copy((uint64_t)to, from, part->sizes[i], device->stream)) return REFUSED;
  }
  return 0;
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

/* Read a part through the hand's buffer, at an aligned offset and in an aligned length. What a
   device is to copy stays there. */
static int read_through(Hand *hand, Part *part, int64_t *done) {
  const Pool *pool = hand->pool;
  int64_t before = part->offset % pool->alignment, needed = before + part->nbytes, got;
  int64_t room = up(needed, pool->alignment);
  if (make_room(hand, room)) return REFUSED;
  uint8_t *at = hand->memory + hand->used;
  int error = fill(part->fd, at, part->offset - before, room, needed, pool->alignment, &got);
  *done = larger(0, smaller(got, needed) - before);
  part->from = at + before;
  if (pool->device.copy) hand->used += up(room, PAGE);
  else if (!error) scatter(&pool->device, part);
  return error;
}

/* Note that a part has ended; the lock is held. */
static void end_part(Pool *pool, Part *part, int64_t done, int error) {
  Batch *batch = part->batch;
  Outcome *outcome = &batch->outcomes[part->block];
  outcome->nbytes += done;
  if (error && !outcome->error)
    *outcome = (Outcome){0, 0, part->offset, part->nbytes, done, part->fd, error};
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
    int error = device->enter(device->context) ? REFUSED : 0;
    for (Part *part = parts; part && !error; part = part->following) error = scatter(device, part);
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
  int error = 0, no_file = part->fd < 0; /* to measure what remains */
  if (no_file) done = part->nbytes;
  else error = hand->memory ? read_through(hand, part, &done) : read_straight(part, &done);
  int64_t nanoseconds = now(CLOCK_MONOTONIC) - start;
  pthread_mutex_lock(&pool->lock);
  part->batch->outcomes[part->block].nanoseconds += nanoseconds;
  if (error || no_file || !pool->device.copy) {
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

/* Take the next part; the lock is held. */
static Part *take(Pool *pool) {
  Part *part = pool->first;
  if (part && !(pool->first = part->following)) pool->end = &pool->first;
  return part;
}

static void *work(void *argument) {
  Hand *hand = argument;
  Pool *pool = hand->pool;
  pthread_mutex_lock(&pool->lock);
  for (;;) {
    while (!pool->first && !pool->closing) pthread_cond_wait(&pool->work, &pool->lock);
    Part *part = take(pool);
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

/* The bytes of a part, so that all threads have one of `count` blocks and it fits in a buffer. */
static int64_t step_of(const Pool *pool, const Layer *layer, int64_t count) {
  int64_t total = 0, cuts = (pool->count + count - 1) / count;
  for (int64_t i = 0; i < layer->components; i++) total += layer->sizes[i];
  int64_t step = up(total, cuts) / cuts;
  if (step < pool->least_piece) step = smaller(total, pool->least_piece);
  if (step >= 8 * PAGE) step = up(step, PAGE);
  return pool->buffer_bytes ? smaller(step, pool->buffer_bytes - 2 * PAGE) : step;
}

/* Add the parts of a block: of all its bytes if they are contiguous, else of each component. */
static void cut(Batch *batch, const Layer *layer, int64_t block, int64_t expert, int64_t slot,
                int64_t step) {
  int contiguous = layer->order[0] >= 0;
  int64_t position = 0, row = expert * layer->components;
  for (int64_t i = 0; i < layer->components; i++) {
    int64_t c = contiguous ? layer->order[i] : i, size = layer->sizes[c], nbytes;
    uint8_t *to = (uint8_t *)layer->addresses[c] + slot * size;
    if (!contiguous) position = 0;
    for (int64_t done = 0; done < size; done += nbytes, position += nbytes) {
      if (position % step == 0)
        batch->parts[batch->count++] = (Part){.batch = batch, .block = block,
            .offset = layer->offsets[row + c] + done, .fd = layer->fds[row + c]};
      Part *part = &batch->parts[batch->count - 1];
      nbytes = smaller(step - position % step, size - done);
      part->into[part->pieces] = to + done;
      part->sizes[part->pieces++] = nbytes;
      part->nbytes += nbytes;
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
   batch_bytes; it and `outcomes` live until all has ended. wake: let threads read; otherwise
   batch_wait does. */
void batch_begin(Pool *pool, Batch *batch, const Layer *layer, int64_t count,
                 const int64_t (*blocks)[2], Outcome *outcomes, int wake) {
  *batch = (Batch){.outcomes = outcomes};
  for (int64_t i = 0, step = step_of(pool, layer, count); i < count; i++)
    cut(batch, layer, i, blocks[i][0], blocks[i][1], step);
  pthread_mutex_lock(&pool->lock);
  for (int64_t i = 0; i < batch->count; i++) {
    *pool->end = &batch->parts[i];
    pool->end = &batch->parts[i].following;
  }
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

/* Read one part if one is left, of any batch, else wait, at most `nanoseconds`. Return 1 once all
   of `batch` have ended. */
int batch_wait(Pool *pool, Batch *batch, int64_t nanoseconds) {
  nanoseconds += now(CLOCK_REALTIME);
  struct timespec until = {nanoseconds / SECOND, nanoseconds % SECOND};
  pthread_mutex_lock(&pool->lock);
  Part *part = batch->ended < batch->count ? take(pool) : NULL;
  if (part) {
    pthread_mutex_unlock(&pool->lock);
    read_part(&pool->hands[pool->count], part);
    pthread_mutex_lock(&pool->lock);
  } else if (batch->ended < batch->count) {
    pthread_cond_timedwait(&pool->ended, &pool->lock, &until);
  }
  int over = batch->ended == batch->count;
  pthread_mutex_unlock(&pool->lock);
  return over;
}

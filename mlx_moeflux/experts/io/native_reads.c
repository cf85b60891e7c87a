/* Threads that read blocks of experts from files into memory. POSIX and C11; no Python, no MLX.
   native_pool.py calls these functions and owns all memory that they get. A layer says where its
   blocks and slots lie, a batch reads some blocks into slots, the threads take parts of blocks. */

#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <time.h>

enum { MOST_COMPONENTS = 16, ENDS_EARLY = -1, REFUSED = -2, SECOND = 1000000000 };

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

/* Consecutive bytes of a file and the pieces of memory that they go to. */
typedef struct {
  int64_t block, offset, nbytes;
  struct iovec into[MOST_COMPONENTS];
  int fd, pieces;
} Part;

typedef struct Batch {
  struct Batch *following;
  Outcome *outcomes;
  int64_t count, next, ended; /* parts: in all, of the next one to begin, that have ended */
  Part parts[];
} Batch;

/* What reads: a thread of the pool, or the caller. memory: its buffer, or NULL. */
typedef struct {
  struct Pool *pool;
  uint8_t *memory;
  int64_t used;
  pthread_t thread;
} Hand;

typedef struct Pool {
  pthread_mutex_t lock;
  pthread_cond_t work, ended;
  Batch *first;
  Device device;
  int64_t alignment, least_piece, buffer_bytes;
  int count, closing;
  Hand hands[]; /* the threads', and that of a caller without a buffer */
} Pool;

static int64_t now(clockid_t clock) {
  struct timespec t;
  clock_gettime(clock, &t);
  return (int64_t)t.tv_sec * SECOND + t.tv_nsec;
}
static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

/* Read at least one byte, or return an error. */
static int read_some(int fd, const struct iovec *into, int pieces, int64_t offset, int64_t *got) {
  do *got = preadv(fd, into, pieces, offset);
  while (*got < 0 && errno == EINTR);
  return *got > 0 ? 0 : *got ? errno : ENDS_EARLY;
}

/* Read a part straight into its memory. */
static int read_straight(Part *part, int64_t *done) {
  struct iovec left[MOST_COMPONENTS];
  memcpy(left, part->into, sizeof left);
  for (int first = 0; *done < part->nbytes;) {
    int64_t got;
    int error = read_some(part->fd, left + first, part->pieces - first, part->offset + *done, &got);
    if (error) return error;
    for (*done += got; first < part->pieces && got >= (int64_t)left[first].iov_len; first++)
      got -= left[first].iov_len;
    if (first < part->pieces) {
      left[first].iov_base = (uint8_t *)left[first].iov_base + got;
      left[first].iov_len -= got;
    }
  }
  return 0;
}

/* Copy bytes [begin, end) of a part from `from` to where they belong. */
static int scatter(const Device *device, Part *part, int64_t begin, int64_t end, uint8_t *from) {
  int64_t position = 0;
  for (int i = 0; i < part->pieces; i++) {
    int64_t a = larger(begin, position), b = smaller(end, position + part->into[i].iov_len);
    uint8_t *to = (uint8_t *)part->into[i].iov_base + (a - position), *source = from + (a - begin);
    if (a < b && !device->copy) memcpy(to, source, b - a);
    else if (a < b && device->copy((uint64_t)to, source, b - a, device->stream)) return REFUSED;
    position += part->into[i].iov_len;
  }
  return 0;
}

/* Read a part through the hand's buffer, in steps of aligned offsets and lengths. */
static int read_through(Hand *hand, Part *part, int64_t *done) {
  const Pool *pool = hand->pool;
  const Device *device = &pool->device;
  int64_t align = pool->alignment, stop = part->offset + part->nbytes, got;
  if (device->copy && device->enter(device->context)) return REFUSED;
  while (*done < part->nbytes) {
    int64_t position = part->offset + *done, start = position - position % align;
    int64_t wanted = (stop - start + align - 1) / align * align;
    if (hand->used && hand->used + wanted > pool->buffer_bytes) {
      /* The driver still copies what was read into the buffer before. */
      if (device->finish(device->stream)) return REFUSED;
      hand->used = 0;
    }
    uint8_t *at = hand->memory + hand->used;
    struct iovec into = {at, smaller(wanted, pool->buffer_bytes)};
    int error = read_some(part->fd, &into, 1, start, &got);
    if (error) return error;
    int64_t end = smaller(start + got, stop);
    if (end <= position) return ENDS_EARLY;
    error = scatter(device, part, *done, end - part->offset, at + (position - start));
    if (error) return error;
    if (device->copy) hand->used += (into.iov_len + 4095) / 4096 * 4096; /* stays aligned */
    *done = end - part->offset;
  }
  return 0;
}

/* Read a part; the lock is not held. */
static void read_part(Hand *hand, Batch *batch, Part *part) {
  Pool *pool = hand->pool;
  int64_t start = now(CLOCK_MONOTONIC), done = 0;
  int error = hand->memory ? read_through(hand, part, &done) : read_straight(part, &done);
  int64_t nanoseconds = now(CLOCK_MONOTONIC) - start;
  pthread_mutex_lock(&pool->lock);
  Outcome *outcome = &batch->outcomes[part->block];
  outcome->nbytes += done;
  outcome->nanoseconds += nanoseconds;
  if (error && !outcome->error)
    *outcome = (Outcome){0, 0, part->offset, part->nbytes, done, part->fd, error};
  if (++batch->ended == batch->count) pthread_cond_broadcast(&pool->ended);
  pthread_mutex_unlock(&pool->lock);
}

/* Take the next part of a batch; the lock is held. A batch without another leaves the queue. */
static Part *take(Pool *pool, Batch *batch) {
  if (batch->next == batch->count) return NULL;
  Part *part = &batch->parts[batch->next++];
  if (batch->next == batch->count) {
    Batch **link = &pool->first;
    while (*link && *link != batch) link = &(*link)->following;
    if (*link) *link = batch->following;
  }
  return part;
}

static void *work(void *argument) {
  Hand *hand = argument;
  Pool *pool = hand->pool;
  pthread_mutex_lock(&pool->lock);
  for (;;) {
    while (!pool->first && !pool->closing) pthread_cond_wait(&pool->work, &pool->lock);
    Batch *batch = pool->first;
    if (!batch) break;
    Part *part = take(pool, batch);
    if (pool->first) pthread_cond_signal(&pool->work); /* each thread wakes the next */
    pthread_mutex_unlock(&pool->lock);
    read_part(hand, batch, part);
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

/* Begin `count` threads. memory: buffers of buffer_bytes for them, or NULL to read straight into
   slots. least_piece: bytes that are worth a read. Return NULL without threads or memory. */
Pool *pool_open(int count, int64_t alignment, int64_t least_piece, int64_t buffer_bytes,
                uint8_t *memory, const Device *device) {
  Pool *pool = calloc(1, sizeof *pool + (count + 1) * sizeof *pool->hands);
  if (!pool) return NULL;
  *pool = (Pool){.alignment = alignment, .least_piece = least_piece, .buffer_bytes = buffer_bytes};
  pthread_mutex_init(&pool->lock, NULL);
  pthread_cond_init(&pool->work, NULL);
  pthread_cond_init(&pool->ended, NULL);
  if (device) pool->device = *device;
  for (int i = 0; i <= count; i++) {
    Hand *hand = &pool->hands[i];
    hand->pool = pool;
    if (i == count) return pool;
    hand->memory = memory ? memory + i * buffer_bytes : NULL;
    if (pthread_create(&hand->thread, NULL, work, hand)) break;
    pool->count++;
  }
  pool_close(pool);
  return NULL;
}

/* Make the parts of a block: `cuts` of its bytes if they are contiguous, else its components. */
static int cut(const Pool *pool, const Layer *layer, int64_t block, int64_t expert, int64_t slot,
               int64_t cuts, Part *parts) {
  const int32_t *fds = layer->fds + expert * layer->components;
  const int64_t *offsets = layer->offsets + expert * layer->components;
  int contiguous = layer->order[0] >= 0, count = 0;
  int64_t total = 0, position = 0;
  for (int64_t i = 0; i < layer->components; i++) total += layer->sizes[i];
  cuts = larger(1, smaller(cuts, total / pool->least_piece));
  int64_t step = (total + cuts - 1) / cuts;
  if (step >= 8 * 4096) step = (step + 4095) / 4096 * 4096;
  for (int64_t i = 0; i < layer->components; i++) {
    int64_t c = contiguous ? layer->order[i] : i, size = layer->sizes[c];
    uint8_t *to = (uint8_t *)layer->addresses[c] + slot * size;
    for (int64_t done = 0; done < size;) {
      int64_t room = contiguous ? step - position % step : size;
      int64_t nbytes = smaller(room, size - done);
      if (!contiguous || position % step == 0)
        parts[count++] = (Part){.block = block, .offset = offsets[c] + done, .fd = fds[c]};
      Part *part = &parts[count - 1];
      part->into[part->pieces++] = (struct iovec){to + done, nbytes};
      part->nbytes += nbytes;
      done += nbytes;
      position += nbytes;
    }
  }
  return count;
}

/* The bytes that a batch of so many parts takes. */
int64_t batch_bytes(int64_t parts) { return sizeof(Batch) + parts * sizeof(Part); }

/* Begin to read `count` experts into slots. batch: zeroed memory for as many parts of each as there
   are components or threads; it and `outcomes` live until all has ended. wake: let threads read;
   otherwise batch_wait does. */
void batch_begin(Pool *pool, Batch *batch, const Layer *layer, int64_t count,
                 const int64_t *experts, const int64_t *slots, Outcome *outcomes, int wake) {
  int64_t cuts = wake ? (pool->count + count - 1) / count : 1, parts = 0;
  for (int64_t i = 0; i < count; i++)
    parts += cut(pool, layer, i, experts[i], slots[i], cuts, batch->parts + parts);
  batch->outcomes = outcomes;
  batch->count = parts;
  if (!wake) return;
  pthread_mutex_lock(&pool->lock);
  Batch **link = &pool->first;
  while (*link) link = &(*link)->following;
  *link = batch;
  pthread_cond_signal(&pool->work);
  pthread_mutex_unlock(&pool->lock);
}

/* Let no further part begin. */
void batch_abandon(Pool *pool, Batch *batch) {
  pthread_mutex_lock(&pool->lock);
  while (take(pool, batch)) batch->ended++;
  pthread_mutex_unlock(&pool->lock);
}

/* Read one part if one is left and needs no buffer, else wait, at most `nanoseconds`. Return 1 once
   all have ended. */
int batch_wait(Pool *pool, Batch *batch, int64_t nanoseconds) {
  nanoseconds += now(CLOCK_REALTIME);
  struct timespec until = {nanoseconds / SECOND, nanoseconds % SECOND};
  pthread_mutex_lock(&pool->lock);
  Part *part = pool->buffer_bytes ? NULL : take(pool, batch);
  if (part) {
    pthread_mutex_unlock(&pool->lock);
    read_part(&pool->hands[pool->count], batch, part);
    pthread_mutex_lock(&pool->lock);
  } else if (batch->ended < batch->count) {
    pthread_cond_timedwait(&pool->ended, &pool->lock, &until);
  }
  int over = batch->ended == batch->count;
  pthread_mutex_unlock(&pool->lock);
  return over;
}

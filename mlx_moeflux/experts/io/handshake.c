/* The host's side of the handshake: threads that answer kernels which wait for the slots of a layer.
   docs/handshake.md has the protocol. POSIX and C11; no Python, no MLX, nothing of a GPU's driver.
   One library holds this file and native_reads.c, whose functions read and check. */

#include "native_reads.c"
#include <math.h>
#include <sched.h>

/* Words of 64 bits in memory that the host and the kernels share. */
enum { TURN, ABORT, LIMIT };                        /* of all layers */
enum { MOST_CHOSEN = 31, ANSWER = 32, PIECES = 64 }; /* of a layer; ids are at 0 */
enum { TO, FROM, NBYTES, READY, PIECE_WORDS };      /* of a piece */
enum { TAG = 16, MOST_READERS = 64, LOOKS = 64, DOZE = 5000000 };
enum { NO_EXPERT = -5 }; /* further to the errors of native_reads.c */
/* Weights of uses grow to 2^MOST_GROWTH; see LFU in eviction.py. */
enum { MOST_GROWTH = 500 };

#define GET(p) __atomic_load_n(p, __ATOMIC_ACQUIRE)
#define PUT(p, v) __atomic_store_n(p, v, __ATOMIC_RELEASE)
#define ADD(p, v) __atomic_add_fetch(p, v, __ATOMIC_ACQ_REL)

typedef struct {
  int64_t lookups, misses, evictions, bytes, read, waited, decided; /* the last three in nanoseconds */
} Counts;

/* The slots of a layer. slot_of, expert_of: -1 for none. scores: of experts; the resident with the
   lowest leaves. since: the turn in which a slot was filled. time: tokens that the layer has seen.
   base: of the weights of uses, or the highest score if the latest use decides. */
typedef struct {
  const Layer *places;
  uint64_t *box;
  int32_t *slot_of, *expert_of;
  double *scores;
  int64_t *since;
  Counts *counts;
  int64_t slots, experts, time;
  double base;
} Shelf;

/* What ended the handshake first. */
typedef struct {
  int64_t shelf, expert;
  Outcome outcome;
} Failure;

/* What the caller chooses. words: memory that kernels read. staging: where parts are read to, or NULL:
   straight into slots. pulled: kernels copy from staging into slots; else threads write slots.
   chosen: experts of a call. rate: uses count half after 1 / rate tokens; 0: the latest use decides.
   step: most bytes of a part; room: its staging. parts: most of a call. */
typedef struct {
  Shelf *shelves;
  uint64_t *words;
  uint8_t *staging;
  int64_t pulled, count, chosen, alignment, step, room, parts, readers;
  double rate;
} Plan;

typedef struct {
  Plan plan;
  Failure failure;
  int failed, stop, threads;
  int64_t ended, idle_since;
  pthread_mutex_t lock;
  pthread_cond_t wake;
  pthread_t ids[MOST_READERS + 1];
  /* The reads of a call. head, tail: parts that were taken and that are there, since the begin; the
     first of the call is number `base`. first: of a part's pieces. */
  Batch *batch;
  Outcome outcomes[MOST_CHOSEN];
  int64_t experts[MOST_CHOSEN];
  int64_t *first, base, shelf;
  int64_t head __attribute__((aligned(128)));
  int64_t tail __attribute__((aligned(128)));
  int64_t done __attribute__((aligned(128)));
} Desk;

static void relax(Desk *desk, int *looks) {
  if (++*looks % LOOKS) {
#if defined(__x86_64__)
    _mm_pause();
#endif
    return;
  }
  sched_yield();
  uint64_t *turn = &desk->plan.words[TURN];
  if (GET(&desk->ended) != (int64_t)GET(turn)) return;
  if (now(CLOCK_MONOTONIC) - GET(&desk->idle_since) < DOZE) return;
  pthread_mutex_lock(&desk->lock);
  while (!desk->stop && GET(&desk->ended) == (int64_t)GET(turn))
    pthread_cond_wait(&desk->wake, &desk->lock);
  pthread_mutex_unlock(&desk->lock);
}

static void fail(Desk *desk, int64_t expert, Outcome outcome) {
  int none = 0;
  if (!__atomic_compare_exchange_n(&desk->failed, &none, 1, 0, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) return;
  desk->failure = (Failure){desk->shelf, expert, outcome};
  PUT(&desk->plan.words[ABORT], 1);
}

/* Read a part to where its slot's bytes are taken from: to staging if kernels take them, else to the
   slot. */
static int read_for(const Plan *plan, Part *part, int64_t number, int64_t *done) {
  int fd = part->batch->layer->files[part->file].fd;
  if (!plan->staging) return read_straight(part, fd, done);
  int error = read_aligned(part, fd, plan->staging + number * plan->room, plan->alignment, done);
  if (!error && !plan->pulled) scatter(part);
  return error;
}

/* Tell kernels that the pieces of a part are in staging. */
static void mark_ready(Desk *desk, const Part *part, int64_t number) {
  uint64_t *piece = desk->plan.shelves[desk->shelf].box + PIECES + PIECE_WORDS * desk->first[number];
  uint64_t word = GET(&desk->plan.words[TURN]) << TAG;
  for (int i = 0; i < part->pieces; i++) PUT(piece + PIECE_WORDS * i + READY, word);
}

/* Read one part of the present call; return 0 if none is left. */
static int read_one(Desk *desk) {
  int64_t head = GET(&desk->head);
  if (head >= GET(&desk->tail)) return 0;
  if (!__atomic_compare_exchange_n(&desk->head, &head, head + 1, 0, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED))
    return 1;
  /* No other call begins before this part has ended. */
  int64_t number = head - desk->base, done = 0, start = now(CLOCK_MONOTONIC);
  Part *part = &desk->batch->parts[number];
  const Layer *places = part->batch->layer;
  Outcome *outcome = &desk->outcomes[part->block];
  int error = 0;
  if (GET(&desk->plan.words[ABORT])) goto end;
  if (part->file < 0) done = part->nbytes; /* to measure what remains */
  else error = read_for(&desk->plan, part, number, &done);
  if (!error && places->checksums) __atomic_xor_fetch(&outcome->rest, share(part), __ATOMIC_ACQ_REL);
  /* The checksum is looked at before the block's last part can be taken. */
  int64_t whole = part->batch->block_bytes;
  if (ADD(&outcome->nbytes, done) == whole && GET(&outcome->rest)) error = WRONG;
  ADD(&outcome->nanoseconds, now(CLOCK_MONOTONIC) - start);
  if (error) {
    fail(desk, desk->experts[part->block],
         (Outcome){.offset = part->offset, .wanted = part->nbytes, .done = done, .file = part->file, .error = error});
  } else if (desk->plan.pulled) {
    mark_ready(desk, part, number);
  }
end:
  ADD(&desk->done, 1);
  return 1;
}

static void *read_parts(void *argument) {
  Desk *desk = argument;
  for (int looks = 0; !GET(&desk->stop);) {
    if (read_one(desk)) looks = 0;
    else relax(desk, &looks);
  }
  return NULL;
}

/* pow() of a number that the compiler does not know: what it makes of powers of two may differ from
   Python's in the last bit. */
static double power_of_two(double n) {
  static volatile double two = 2;
  return pow(two, n);
}

/* Note the uses of a call, as touch() of LFU and LRU does. */
static void touch(const Plan *plan, Shelf *shelf, const int64_t *experts) {
  if (!plan->rate) {
    for (int i = 0; i < plan->chosen; i++) shelf->scores[experts[i]] = ++shelf->base;
    return;
  }
  double growth = shelf->time * plan->rate - shelf->base;
  if (growth > MOST_GROWTH) {
    shelf->base += growth;
    for (int64_t e = 0; e < shelf->experts; e++) shelf->scores[e] *= power_of_two(-growth);
  }
  double weight = power_of_two(shelf->time * plan->rate - shelf->base);
  for (int i = 0; i < plan->chosen; i++) shelf->scores[experts[i]] += weight;
}

/* Empty a slot for an expert of the call, and return it. The resident with the lowest score that the
   call does not need leaves; of equal ones the lowest id. */
static int64_t make_place(const Plan *plan, Shelf *shelf, const int64_t *experts) {
  int64_t best = -1;
  for (int64_t slot = 0; slot < shelf->slots; slot++) {
    int64_t expert = shelf->expert_of[slot], needed = 0;
    if (expert < 0) return slot;
    for (int i = 0; i < plan->chosen; i++) needed |= experts[i] == expert;
    if (needed) continue;
    if (best < 0) { best = slot; continue; }
    int64_t lowest = shelf->expert_of[best];
    double difference = shelf->scores[expert] - shelf->scores[lowest];
    if (difference < 0 || (difference == 0 && expert < lowest)) best = slot;
  }
  int64_t leaving = shelf->expert_of[best];
  shelf->slot_of[leaving] = shelf->expert_of[best] = -1;
  if (!plan->rate) shelf->scores[leaving] = 0;
  shelf->counts->evictions++;
  return best;
}

/* Let threads read the parts from number `from` on, whose pieces are described for kernels that pull
   them. */
static void publish(Desk *desk, Shelf *shelf, int64_t from, int64_t *pieces) {
  const Plan *plan = &desk->plan;
  for (int64_t i = from; plan->pulled && i < desk->batch->count; i++) {
    const Part *part = &desk->batch->parts[i];
    uint64_t source = (uint64_t)(plan->staging + i * plan->room) + part->offset % plan->alignment;
    desk->first[i] = *pieces;
    for (int p = 0; p < part->pieces; p++, ++*pieces) {
      uint64_t *piece = shelf->box + PIECES + PIECE_WORDS * *pieces;
      piece[TO] = (uint64_t)part->into[p];
      piece[FROM] = source;
      piece[NBYTES] = part->sizes[p];
      source += part->sizes[p];
    }
  }
  PUT(&desk->tail, desk->base + desk->batch->count);
}

/* Wait until what was stored before is there for GPUs that share memory with the cores too: Arm's
   ordinary barriers order the cores alone. */
static void reach_gpu(void) {
#if defined(__aarch64__)
  __asm__ volatile("dsb sy" ::: "memory");
#endif
}

/* Answer a call. */
static void post(const Plan *plan, Shelf *shelf, uint64_t turn, const int64_t *slots, int64_t pieces) {
  reach_gpu();
  for (int i = 0; i < plan->chosen; i++) PUT(shelf->box + ANSWER + i, turn << TAG | slots[i]);
  PUT(shelf->box + ANSWER + plan->chosen, turn << TAG | pieces);
  reach_gpu();
}

/* Give the experts of a call their slots, read what is missing, and answer: at once if kernels pull the
   blocks, else when all are in their slots. */
static void answer(Desk *desk, Shelf *shelf, uint64_t turn, const int64_t *experts) {
  const Plan *plan = &desk->plan;
  int64_t start = now(CLOCK_MONOTONIC), missing = 0, pieces = 0, slots[MOST_CHOSEN];
  desk->base = GET(&desk->tail);
  *desk->batch = (Batch){.layer = shelf->places, .outcomes = desk->outcomes,
                         .block_bytes = block_bytes(shelf->places)};
  touch(plan, shelf, experts);
  shelf->time++;
  for (int i = 0; i < plan->chosen; i++) {
    int64_t expert = experts[i];
    slots[i] = shelf->slot_of[expert];
    if (slots[i] >= 0) continue;
    int64_t slot = slots[i] = make_place(plan, shelf, experts), from = desk->batch->count;
    shelf->expert_of[slot] = expert;
    shelf->slot_of[expert] = slot;
    shelf->since[slot] = turn;
    desk->experts[missing] = expert;
    desk->outcomes[missing] =
        (Outcome){.rest = shelf->places->checksums ? shelf->places->checksums[expert] : 0};
    cut(desk->batch, shelf->places, missing++, expert, slot, plan->step);
    publish(desk, shelf, from, &pieces);
  }
  if (plan->pulled) post(plan, shelf, turn, slots, pieces);
  int64_t decided = now(CLOCK_MONOTONIC), bytes = 0, nanoseconds = 0;
  while (read_one(desk)) {}
  for (int looks = 0; GET(&desk->done) < GET(&desk->tail);) relax(desk, &looks);
  check_files(desk->batch);
  for (int i = 0; i < missing; i++) {
    bytes += desk->outcomes[i].nbytes;
    nanoseconds += desk->outcomes[i].nanoseconds;
    if (desk->outcomes[i].error) fail(desk, desk->experts[i], desk->outcomes[i]);
  }
  if (!plan->pulled && !GET(&plan->words[ABORT])) post(plan, shelf, turn, slots, 0);
  Counts *counts = shelf->counts;
  counts->lookups += plan->chosen;
  counts->misses += missing;
  counts->bytes += bytes;
  counts->read += nanoseconds;
  counts->decided += decided - start;
  if (missing) counts->waited += now(CLOCK_MONOTONIC) - decided;
}

/* Wait for the ids of a call; return 0 if the turn ends without them. */
static int take_ids(Desk *desk, const Shelf *shelf, uint64_t turn, int64_t *experts) {
  int looks = 0;
  for (int i = 0; i < desk->plan.chosen; i++) {
    uint64_t word;
    while ((word = GET(shelf->box + i)) >> TAG != turn) {
      if (GET(&desk->plan.words[ABORT]) || GET(&desk->stop)) return 0;
      relax(desk, &looks);
    }
    experts[i] = word & ((1 << TAG) - 1);
    if (experts[i] >= shelf->experts) {
      fail(desk, experts[i], (Outcome){.error = NO_EXPERT});
      return 0;
    }
  }
  return !GET(&desk->plan.words[ABORT]);
}

static void *answer_turns(void *argument) {
  Desk *desk = argument;
  int64_t experts[MOST_CHOSEN];
  for (int looks = 0; !GET(&desk->stop);) {
    uint64_t turn = GET(&desk->plan.words[TURN]);
    if ((int64_t)turn == GET(&desk->ended)) {
      relax(desk, &looks);
      continue;
    }
    for (desk->shelf = 0; desk->shelf < desk->plan.count; desk->shelf++) {
      Shelf *shelf = &desk->plan.shelves[desk->shelf];
      if (!take_ids(desk, shelf, turn, experts)) break;
      answer(desk, shelf, turn, experts);
    }
    PUT(&desk->idle_since, now(CLOCK_MONOTONIC));
    PUT(&desk->ended, (int64_t)turn);
    looks = 0;
  }
  return NULL;
}

/* Begin a step of the model. No other is under way. */
void desk_begin(Desk *desk) {
  pthread_mutex_lock(&desk->lock);
  uint64_t *words = desk->plan.words;
  if (!desk->failed) PUT(&words[ABORT], 0);
  PUT(&words[TURN], words[TURN] + 1);
  pthread_cond_broadcast(&desk->wake);
  pthread_mutex_unlock(&desk->lock);
}

/* Let no kernel and no thread wait for the rest of this step. */
void desk_abort(Desk *desk) { PUT(&desk->plan.words[ABORT], 1); }

/* Wait, at most `nanoseconds`, until no thread reads or writes for the last step; return 1 then. */
int desk_ended(Desk *desk, int64_t nanoseconds) {
  int64_t until = now(CLOCK_MONOTONIC) + nanoseconds;
  while (GET(&desk->ended) != (int64_t)GET(&desk->plan.words[TURN])) {
    if (now(CLOCK_MONOTONIC) > until) return 0;
    sched_yield();
  }
  return 1;
}

/* Copy what ended the handshake; return 0 if nothing did. A kernel that did not wait longer leaves no
   failure of a thread: its `error` is 0. */
int desk_failure(Desk *desk, Failure *failure) {
  *failure = desk->failure;
  return GET(&desk->failed) || GET(&desk->plan.words[ABORT]);
}

/* End the threads, which waits for reads that are under way, and set the pointer to NULL. Where it is
   that, nothing is left to do. */
void desk_close(Desk **at) {
  Desk *desk = *at;
  if (!desk) return;
  pthread_mutex_lock(&desk->lock);
  PUT(&desk->plan.words[ABORT], 1);
  PUT(&desk->stop, 1);
  pthread_cond_broadcast(&desk->wake);
  pthread_mutex_unlock(&desk->lock);
  for (int i = 0; i < desk->threads; i++) pthread_join(desk->ids[i], NULL);
  *at = NULL;
  free(desk->batch);
  free(desk->first);
  free(desk);
}

/* Begin the threads, and keep them where the caller finds them also if it is interrupted as this
   returns; NULL if the system gives none or no memory. */
void desk_open(Desk **at, const Plan *plan) {
  Desk *desk = *at = aligned_alloc(128, up(sizeof *desk, 128));
  if (!desk) return;
  memset(desk, 0, sizeof *desk);
  desk->plan = *plan;
  desk->batch = calloc(1, sizeof(Batch) + plan->parts * sizeof(Part));
  desk->first = calloc(plan->parts, sizeof *desk->first);
  desk->ended = desk->plan.words[TURN];
  pthread_mutex_init(&desk->lock, NULL);
  pthread_cond_init(&desk->wake, NULL);
  int refused = !desk->batch || !desk->first;
  for (int64_t i = 0; i <= plan->readers && !refused; i++) {
    refused = pthread_create(&desk->ids[i], NULL, i ? read_parts : answer_turns, desk) != 0;
    desk->threads += !refused;
  }
  if (refused) desk_close(at);
}

/* Preloaded into a test's process: reads of files whose path contains a text fail or lie.
   cc -shared -fPIC faults.c -ldl */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

enum { NONE, SHORT, FAILS, INTERRUPTED, WRONG, SLOW, GONE, STALLS };

static char where[256];
static int mode, every;
static atomic_long calls, faults, most;

/* Let every `n`th read of a file with `text` in its path go wrong. */
void set_fault(int kind, int n, const char *text) {
  mode = kind;
  every = n;
  snprintf(where, sizeof where, "%s", text);
  calls = faults = most = 0;
}

/* Let so many reads go wrong, and then no more; 0: all. */
void limit_faults(long n) { most = n; }

long count_faults(void) { return faults; }

static int fault_of(int fd) {
  char link[64], path[4096];
  if (!mode) return NONE;
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t n = readlink(link, path, sizeof path - 1);
  path[n > 0 ? n : 0] = 0;
  if (!strstr(path, where) || ++calls % every || (most && faults >= most)) return NONE;
  faults++;
  return mode;
}

/* Half of `count`, in whole sectors as disks read. */
static size_t half(size_t count) { return count <= 512 ? count : (count / 2 + 511) / 512 * 512; }

ssize_t preadv64(int fd, const struct iovec *pieces, int count, off_t offset) {
  static ssize_t (*next)(int, const struct iovec *, int, off_t);
  if (!next) next = dlsym(RTLD_NEXT, "preadv64");
  int fault = fault_of(fd);
  struct iovec some[1024];
  if (fault == FAILS || fault == GONE || fault == INTERRUPTED) {
    errno = fault == FAILS ? EIO : fault == GONE ? ENODEV : EINTR;
    return -1;
  }
  if (fault == SLOW) usleep(5000);
  if (fault == STALLS) sleep(1);
  if (fault == SHORT) {
    size_t left = 0;
    for (int i = 0; i < count; i++) left += pieces[i].iov_len;
    left = half(left);
    for (int i = 0; i < count && i < 1024; i++) {
      some[i] = pieces[i];
      if (some[i].iov_len >= left) some[i].iov_len = left, count = i + 1;
      left -= some[i].iov_len;
    }
    pieces = some;
  }
  ssize_t got = next(fd, pieces, count, offset);
  if (fault == WRONG && got > 0) ((char *)pieces[0].iov_base)[pieces[0].iov_len / 2] ^= 4;
  return got;
}

/* What Python calls. */
ssize_t preadv64v2(int fd, const struct iovec *pieces, int count, off_t offset, int flags) {
  (void)flags;
  return preadv64(fd, pieces, count, offset);
}

ssize_t preadv2(int fd, const struct iovec *pieces, int count, off_t offset, int flags) {
  return preadv64v2(fd, pieces, count, offset, flags);
}

ssize_t pread64(int fd, void *into, size_t count, off_t offset) {
  struct iovec piece = {into, count};
  return preadv64(fd, &piece, 1, offset);
}

ssize_t preadv(int fd, const struct iovec *pieces, int count, off_t offset) {
  return preadv64(fd, pieces, count, offset);
}

ssize_t pread(int fd, void *into, size_t count, off_t offset) {
  return pread64(fd, into, count, offset);
}

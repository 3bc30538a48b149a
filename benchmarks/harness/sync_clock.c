// How long a process waits for the disk, apart from everything else: put in front of libc with LD_PRELOAD.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
#include <stddef.h>
#include <time.h>

static atomic_llong waited_ns;

long long sync_clock_ns(void) { return waited_ns; }

static long long now_ns(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

#define TIMED(call)                     \
    const long long started = now_ns(); \
    const int result = call;            \
    waited_ns += now_ns() - started;    \
    return result

int fsync(int fd) {
    int (*next)(int) = (int (*)(int))dlsym(RTLD_NEXT, "fsync");
    TIMED(next(fd));
}

int fdatasync(int fd) {
    int (*next)(int) = (int (*)(int))dlsym(RTLD_NEXT, "fdatasync");
    TIMED(next(fd));
}

int syncfs(int fd) {
    int (*next)(int) = (int (*)(int))dlsym(RTLD_NEXT, "syncfs");
    TIMED(next(fd));
}

int sync_file_range(int fd, long offset, long bytes, unsigned flags) {
    int (*next)(int, long, long, unsigned) = (int (*)(int, long, long, unsigned))dlsym(RTLD_NEXT, "sync_file_range");
    TIMED(next(fd, offset, bytes, flags));
}

int msync(void* address, size_t bytes, int flags) {
    int (*next)(void*, size_t, int) = (int (*)(void*, size_t, int))dlsym(RTLD_NEXT, "msync");
    TIMED(next(address, bytes, flags));
}

/* Preloaded: counts the calls that change files below one directory, and lets the n-th kill the process or find the
 * disk full from then on. Counts what Python and SQLite do alike, since both call the C library. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <unistd.h>

static char below[4096];
static long at = -1, seen;
static int full;

/* The n-th call from now on (from 0) is hit; n < 0: none is. */
void fault_arm(const char *directory, long n, int disk_full) {
    snprintf(below, sizeof below, "%s/", directory);
    at = n;
    seen = 0;
    full = disk_full;
}

long fault_seen(void) { return seen; }

static int hit(const char *path, int needs_room) {
    char real[4096];
    if (!below[0] || !path) return 0;
    if (path[0] != '/') {
        ssize_t n = readlink("/proc/self/cwd", real, sizeof real - 1);
        if (n < 0) return 0;
        snprintf(real + n, sizeof real - n, "/%s", path);
        path = real;
    }
    if (strncmp(path, below, strlen(below))) return 0;
    long number = seen++;
    if (at < 0 || number < at) return 0;
    if (!full) kill(getpid(), SIGKILL);
    if (!needs_room) return 0;
    errno = ENOSPC;
    return 1;
}

static int hit_fd(int fd, const char *name, int needs_room) {
    char link[64], path[8192];
    if (!below[0]) return 0;
    if (name && name[0] == '/') return hit(name, needs_room);
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = fd == AT_FDCWD ? readlink("/proc/self/cwd", path, 4095) : readlink(link, path, 4095);
    if (n < 0) return 0;
    path[n] = 0;
    if (name) snprintf(path + n, sizeof path - n, "/%s", name);
    return hit(path, needs_room);
}

#define NEXT(name) __typeof__(&name) next = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

#define OPEN(name)                                                             \
    int name(const char *path, int flags, ...) {                               \
        NEXT(name);                                                            \
        va_list rest; va_start(rest, flags);                                   \
        int mode = va_arg(rest, int); va_end(rest);                            \
        if ((flags & O_CREAT) && hit(path, 1)) return -1;                      \
        return next(path, flags, mode);                                        \
    }
#define OPENAT(name)                                                           \
    int name(int fd, const char *path, int flags, ...) {                       \
        NEXT(name);                                                            \
        va_list rest; va_start(rest, flags);                                   \
        int mode = va_arg(rest, int); va_end(rest);                            \
        if ((flags & O_CREAT) && hit_fd(fd, path, 1)) return -1;               \
        return next(fd, path, flags, mode);                                    \
    }
OPEN(open) OPEN(open64) OPENAT(openat) OPENAT(openat64)

#define ON_FD(type, name, needs_room, parameters, ...)                         \
    type name parameters { NEXT(name); return hit_fd(fd, NULL, needs_room) ? -1 : next(__VA_ARGS__); }
ON_FD(ssize_t, write, 1, (int fd, const void *data, size_t size), fd, data, size)
ON_FD(ssize_t, pwrite, 1, (int fd, const void *data, size_t size, off_t place), fd, data, size, place)
ON_FD(ssize_t, pwrite64, 1, (int fd, const void *data, size_t size, off64_t place), fd, data, size, place)
ON_FD(int, fsync, 1, (int fd), fd)
ON_FD(int, fdatasync, 1, (int fd), fd)
ON_FD(int, ftruncate, 0, (int fd, off_t size), fd, size)
ON_FD(int, ftruncate64, 0, (int fd, off64_t size), fd, size)

#define ON_PATH(name, needs_room, parameters, path, ...)                       \
    int name parameters { NEXT(name); return hit(path, needs_room) ? -1 : next(__VA_ARGS__); }
ON_PATH(unlink, 0, (const char *path), path, path)
ON_PATH(rename, 1, (const char *old, const char *path), path, old, path)
ON_PATH(link, 1, (const char *old, const char *path), path, old, path)
ON_PATH(mkdir, 1, (const char *path, mode_t mode), path, path, mode)

int unlinkat(int fd, const char *path, int flags) {
    NEXT(unlinkat);
    return hit_fd(fd, path, 0) ? -1 : next(fd, path, flags);
}
int renameat(int old_fd, const char *old, int fd, const char *path) {
    NEXT(renameat);
    return hit_fd(fd, path, 1) ? -1 : next(old_fd, old, fd, path);
}
int linkat(int old_fd, const char *old, int fd, const char *path, int flags) {
    NEXT(linkat);
    return hit_fd(fd, path, 1) ? -1 : next(old_fd, old, fd, path, flags);
}
int mkdirat(int fd, const char *path, mode_t mode) {
    NEXT(mkdirat);
    return hit_fd(fd, path, 1) ? -1 : next(fd, path, mode);
}

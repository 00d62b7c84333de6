/*
 * A drive with sectors that cannot be read, under a kernel without io_uring: loaded into a node by LD_PRELOAD.
 *
 * LARDER_SOAK_BAD names the sectors by their offsets in every file of 8 MiB and more, separated by commas. Each has 4 KiB.
 * As a drive does, this one replaces a sector that is written; LARDER_SOAK_LASTS seconds later (60 if not set) that one cannot be read
 * either.
 *
 * While the file LARDER_SOAK_HANGS exists, the drive hangs: no read or write ends.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

enum { MOST = 64, SECTOR = 4096 };
static long long lasts = 60;
static long long bad[MOST];
/* When each was replaced last; 0: never. */
static _Atomic long long replaced[MOST];
static int known;
static const char *hangs;
static ssize_t (*real_pread)(int, void *, size_t, off64_t);
static ssize_t (*real_pwrite)(int, const void *, size_t, off64_t);
static long (*real_syscall)(long, ...);

__attribute__((constructor)) static void read_environment(void) {
    real_pread = (ssize_t(*)(int, void *, size_t, off64_t))dlsym(RTLD_NEXT, "pread64");
    real_pwrite = (ssize_t(*)(int, const void *, size_t, off64_t))dlsym(RTLD_NEXT, "pwrite64");
    real_syscall = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
    hangs = getenv("LARDER_SOAK_HANGS");
    char *text = getenv("LARDER_SOAK_LASTS");
    if (text != NULL)
        lasts = atoll(text);
    text = getenv("LARDER_SOAK_BAD");
    while (text != NULL && *text != '\0' && known < MOST) {
        bad[known++] = strtoll(text, &text, 10);
        if (*text == ',')
            text++;
    }
}

static long long now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec;
}

static int is_drive(int file) {
    struct stat found;
    return fstat(file, &found) == 0 && S_ISREG(found.st_mode) && found.st_size >= (8 << 20);
}

static int covers(long long offset, size_t bytes, int sector) {
    return bad[sector] < offset + (long long)bytes && offset < bad[sector] + SECTOR;
}

static int is_bad(int file, long long offset, size_t bytes) {
    for (int i = 0; i < known; i++)
        if (covers(offset, bytes, i) && (replaced[i] == 0 || now() >= replaced[i] + lasts))
            return is_drive(file);
    return 0;
}

static void wait_while_hanging(int file) {
    while (hangs != NULL && access(hangs, F_OK) == 0 && is_drive(file))
        usleep(10000);
}

ssize_t pwrite64(int file, const void *memory, size_t bytes, off64_t offset) {
    wait_while_hanging(file);
    for (int i = 0; i < known; i++)
        if (covers(offset, bytes, i) && is_bad(file, offset, bytes))
            replaced[i] = now();
    return real_pwrite(file, memory, bytes, offset);
}

ssize_t pwrite(int file, const void *memory, size_t bytes, off_t offset) {
    return pwrite64(file, memory, bytes, offset);
}

ssize_t pread64(int file, void *memory, size_t bytes, off64_t offset) {
    wait_while_hanging(file);
    if (is_bad(file, offset, bytes)) {
        errno = EIO;
        return -1;
    }
    return real_pread(file, memory, bytes, offset);
}

ssize_t pread(int file, void *memory, size_t bytes, off_t offset) {
    return pread64(file, memory, bytes, offset);
}

long syscall(long number, ...) {
    va_list list;
    long a[6];
    va_start(list, number);
    for (int i = 0; i < 6; i++)
        a[i] = va_arg(list, long);
    va_end(list);
    if (number == SYS_io_uring_setup) {
        errno = ENOSYS;
        return -1;
    }
    return real_syscall(number, a[0], a[1], a[2], a[3], a[4], a[5]);
}

/*
 * A drive with sectors that cannot be read, under a kernel without io_uring: loaded into a node by LD_PRELOAD.
 *
 * LARDER_SOAK_BAD names the sectors by their offsets in every file of 8 MiB and more, separated by commas. Each has 4 KiB.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

enum { MOST = 64, SECTOR = 4096 };
static long long bad[MOST];
static int known;
static ssize_t (*real_pread)(int, void *, size_t, off64_t);
static long (*real_syscall)(long, ...);

__attribute__((constructor)) static void read_environment(void) {
    real_pread = (ssize_t(*)(int, void *, size_t, off64_t))dlsym(RTLD_NEXT, "pread64");
    real_syscall = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
    char *text = getenv("LARDER_SOAK_BAD");
    while (text != NULL && *text != '\0' && known < MOST) {
        bad[known++] = strtoll(text, &text, 10);
        if (*text == ',')
            text++;
    }
}

static int is_bad(int file, long long offset, size_t bytes) {
    struct stat found;
    for (int i = 0; i < known; i++)
        if (bad[i] < offset + (long long)bytes && offset < bad[i] + SECTOR)
            return fstat(file, &found) == 0 && S_ISREG(found.st_mode) && found.st_size >= (8 << 20);
    return 0;
}

ssize_t pread64(int file, void *memory, size_t bytes, off64_t offset) {
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

// A CUDA driver over host memory: the calls of Larder's CUDA device, carried out in an order in which a GPU might do them.
//
// Streams are queues. Each time somebody asks for an event, some operations at the fronts of random queues are carried out. An
// operation waits for the events that its stream was told to wait for, so a missing event shows as wrong bytes. The kernels are
// done in C, by name. All state is of the calling thread.

#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

// For a test that wrong bytes are found: the kernels leave out this many units.
#ifndef FAKE_FORGOTTEN_UNITS
#define FAKE_FORGOTTEN_UNITS 0
#endif

typedef uint64_t ptr_t;
typedef struct { const char *name; } function_t;
typedef struct { int recorded, done; float at; } event_t;

typedef struct {
    uint64_t entries, planes, plane_bytes, outer_stride, inner_stride;
    uint32_t entry_count, first_plane, plane_count, page_units, run_units, inner_count;
} copy_t;

typedef struct {
    enum { COPY, LAUNCH, WRITE, RECORD, WAIT } kind;
    ptr_t from, to;
    size_t bytes;
    uint32_t value;
    event_t *event;
    int number;
    int gathers;
    copy_t copy;
} op_t;

typedef struct stream { op_t *ops; int first, count, room; struct stream *next; } stream_t;
typedef struct range { ptr_t start; size_t bytes; struct range *next; } range_t;

static __thread struct {
    stream_t *streams;
    range_t *ranges;
    uint64_t random;
    int stalled, broken, break_after, contexts;
    long operations;
    char failing[64];
    int fail_after, fail_code;
    int pinned;
    int capture_mode, others_capture;
} now;

// For tests.
void fake_seed(uint64_t seed) { now.random = seed | 1; }
void fake_stall(int stalled) { now.stalled = stalled; }
void fake_break(int after) { now.break_after = after + 1; }
void fake_fail(const char *call, int after, int code) {
    snprintf(now.failing, sizeof now.failing, "%s", call);
    now.fail_after = after;
    now.fail_code = code;
}
void fake_capture(int others_capture) { now.others_capture = others_capture; }
int fake_pinned(void) { return now.pinned; }
int fake_contexts(void) { return now.contexts; }
int fake_ranges(void) {
    int ranges = 0;
    for (range_t *r = now.ranges; r; r = r->next) ranges++;
    return ranges;
}

#define LENT 1024

// Memory of the process that is also the GPU's, whichever thread asks.
static struct { _Atomic(ptr_t) start; size_t bytes; } lent[LENT];
int fake_lend(void *start, size_t bytes) {
    for (int i = 0; i < LENT; i++)
        if (!lent[i].start) { lent[i].bytes = bytes; lent[i].start = (ptr_t)start; return 0; }
    return 1;
}

#define REGISTERED 4096

// Host memory that the driver knows, of all threads: memory is registered once. By the thread that did it.
static struct { _Atomic(void *) start; void *by; } registered[REGISTERED];

static int call(const char *name) {
    if (now.broken) return now.broken;
    if (now.others_capture && now.capture_mode != 2) return 900;
    if (now.failing[0] && !strcmp(now.failing, name) && now.fail_after-- == 0) {
        now.failing[0] = 0;
        return now.fail_code;
    }
    return 0;
}
#define CALL() do { int failed = call(__func__); if (failed) return failed; } while (0)

// Acts as a driver that hangs, as long as the file that FAKE_CUDA_HANG names exists.
static void hang(void) {
    const char *file = getenv("FAKE_CUDA_HANG");
    while (file && !access(file, F_OK)) usleep(1000);
}

static uint64_t chance(uint64_t below) {
    now.random ^= now.random << 13;
    now.random ^= now.random >> 7;
    now.random ^= now.random << 17;
    return now.random % below;
}

static void run_kernel(const op_t *op) {
    const copy_t *c = &op->copy;
    for (uint32_t p = 0; p < c->plane_count; p++)
        for (uint32_t e = 0; e < c->entry_count; e++) {
            const uint8_t *entry = (const uint8_t *)c->entries + 16 * e;
            const uint64_t *plane = (const uint64_t *)c->planes + 2 * (c->first_plane + p);
            uint64_t block = *(const uint64_t *)entry + (c->first_plane + p) * c->plane_bytes;
            uint64_t paged = plane[0] + *(const uint32_t *)(entry + 8) * plane[1];
            for (uint32_t unit = 0; unit + FAKE_FORGOTTEN_UNITS < c->page_units; unit++) {
                uint32_t run = unit / c->run_units;
                uint64_t at = run / c->inner_count * c->outer_stride + run % c->inner_count * c->inner_stride +
                              unit % c->run_units * 16ull;
                void *in_block = (void *)(block + 16ull * unit), *in_page = (void *)(paged + at);
                memcpy(op->gathers ? in_block : in_page, op->gathers ? in_page : in_block, 16);
            }
        }
}

// Carries out the first operation of a stream; returns 0 if it has to wait.
static int step(stream_t *stream) {
    op_t *op = &stream->ops[stream->first];
    if (op->kind == WAIT && op->event->done < op->number) return 0;
    switch (op->kind) {
    case COPY: memmove((void *)op->to, (void *)op->from, op->bytes); break;
    case LAUNCH: run_kernel(op); break;
    case WRITE: __atomic_store_n((uint32_t *)op->to, op->value, __ATOMIC_RELEASE); break;
    case RECORD:
        if (op->event->done < op->number) op->event->done = op->number;
        op->event->at = ++now.operations;
        break;
    case WAIT: break;
    }
    stream->first++;
    if (--stream->count == 0) stream->first = 0;
    if (now.break_after && --now.break_after == 0) now.broken = 700;
    return 1;
}

static void pump(int steps) {
    if (now.stalled) return;
    while (steps-- > 0 && !now.broken) {
        int alive = 0;
        for (stream_t *s = now.streams; s; s = s->next) alive += s->count > 0;
        if (!alive) return;
        int pick = (int)chance(alive);
        for (stream_t *s = now.streams; s; s = s->next)
            if (s->count > 0 && pick-- == 0) { step(s); break; }
    }
}

static int push(stream_t *stream, op_t op) {
    if (stream->first + stream->count == stream->room) {
        memmove(stream->ops, stream->ops + stream->first, stream->count * sizeof op);
        stream->first = 0;
        if (stream->count * 2 >= stream->room) {
            stream->room = stream->room * 2 + 64;
            stream->ops = realloc(stream->ops, stream->room * sizeof op);
        }
    }
    stream->ops[stream->first + stream->count++] = op;
    return 0;
}

static void add_range(ptr_t start, size_t bytes) {
    range_t *range = malloc(sizeof *range);
    *range = (range_t){start, bytes, now.ranges};
    now.ranges = range;
}

static void drop_range(ptr_t start) {
    for (range_t **r = &now.ranges; *r; r = &(*r)->next)
        if ((*r)->start == start) { range_t *gone = *r; *r = gone->next; free(gone); return; }
}

int cuInit(unsigned flags) { (void)flags; if (!now.random) now.random = 1; CALL(); return 0; }
int cuDeviceGetCount(int *count) { CALL(); *count = 1; return 0; }
int cuDeviceGet(int *device, int ordinal) { CALL(); *device = ordinal; return 0; }
int cuDeviceGetName(char *name, int room, int device) { (void)device; snprintf(name, room, "fake GPU"); return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    (void)device;
    CALL();
    *value = attribute == 16 ? 4 : 1;
    return 0;
}
int cuDevicePrimaryCtxRetain(void **context, int device) { (void)device; CALL(); *context = &now; now.contexts++; return 0; }
int cuDevicePrimaryCtxRelease_v2(int device) { (void)device; now.contexts--; return 0; }
int cuDevicePrimaryCtxReset_v2(int device) {
    (void)device;
    now.broken = 0;
    CALL();
    now.contexts = 0;
    now.pinned = 0;
    for (int i = 0; i < REGISTERED; i++)
        if (registered[i].start && registered[i].by == &now) registered[i].start = NULL;
    for (stream_t *s = now.streams; s; s = s->next) s->count = s->first = 0;
    return 0;
}
int cuCtxSetCurrent(void *context) { (void)context; CALL(); return 0; }

int cuThreadExchangeStreamCaptureMode(int *mode) {
    int before = now.capture_mode;
    now.capture_mode = *mode;
    *mode = before;
    return 0;
}

int cuMemAlloc_v2(ptr_t *address, size_t bytes) {
    CALL();
    *address = (ptr_t)aligned_alloc(256, (bytes + 255) / 256 * 256);
    memset((void *)*address, 0xCD, bytes);
    add_range(*address, bytes);
    return 0;
}
int cuMemFree_v2(ptr_t address) { drop_range(address); free((void *)address); return 0; }
int cuMemGetAddressRange_v2(ptr_t *start, size_t *bytes, ptr_t address) {
    CALL();
    for (range_t *r = now.ranges; r; r = r->next)
        if (address >= r->start && address < r->start + r->bytes) { *start = r->start; *bytes = r->bytes; return 0; }
    for (int i = 0; i < LENT; i++)
        if (address - lent[i].start < lent[i].bytes) { *start = lent[i].start; *bytes = lent[i].bytes; return 0; }
    return 1;
}
int cuMemHostRegister_v2(void *start, size_t bytes, unsigned flags) {
    (void)bytes; (void)flags;
    CALL();
    for (int i = 0; i < REGISTERED; i++)
        if (registered[i].start == start) return 712;
    for (int i = 0; i < REGISTERED; i++) {
        void *none = NULL;
        if (!__atomic_compare_exchange_n((void **)&registered[i].start, &none, start, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
            continue;
        registered[i].by = &now;
        now.pinned++;
        return 0;
    }
    return 2;
}
int cuMemHostUnregister(void *start) {
    now.pinned--;
    for (int i = 0; i < REGISTERED; i++)
        if (registered[i].start == start) { registered[i].start = NULL; return 0; }
    return 713;
}
int cuMemHostGetDevicePointer_v2(ptr_t *address, void *start, unsigned flags) {
    (void)flags;
    CALL();
    *address = (ptr_t)start;
    return 0;
}

typedef struct { char reserved[64]; } handle_t;
int cuIpcGetMemHandle(handle_t *handle, ptr_t address) { CALL(); memset(handle, 0, 64); memcpy(handle, &address, 8); return 0; }
int cuIpcOpenMemHandle_v2(ptr_t *address, handle_t handle, unsigned flags) {
    (void)flags;
    CALL();
    memcpy(address, &handle, 8);
    for (range_t *r = now.ranges; r; r = r->next)
        if (r->start == *address) return 0;
    return 1;
}
int cuIpcCloseMemHandle(ptr_t address) { (void)address; return 0; }

int cuMemImportFromShareableHandle(uint64_t *handle, void *descriptor, int kind) {
    CALL();
    if (kind != 1) return 1;
    *handle = dup((int)(intptr_t)descriptor) + 1;
    return *handle ? 0 : 1;
}
int cuMemAddressReserve(ptr_t *address, size_t bytes, size_t alignment, ptr_t wish, unsigned long long flags) {
    (void)alignment; (void)wish; (void)flags;
    CALL();
    *address = (ptr_t)mmap(NULL, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return 0;
}
int cuMemAddressFree(ptr_t address, size_t bytes) { return munmap((void *)address, bytes) ? 1 : 0; }
int cuMemMap(ptr_t address, size_t bytes, size_t offset, uint64_t handle, unsigned long long flags) {
    (void)offset; (void)flags;
    CALL();
    int descriptor = (int)handle - 1;
    if (lseek(descriptor, 0, SEEK_END) < (off_t)bytes) return 1;
    void *at = mmap((void *)address, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, descriptor, 0);
    if (at == MAP_FAILED) return 1;
    add_range(address, bytes);
    return 0;
}
int cuMemUnmap(ptr_t address, size_t bytes) { (void)bytes; drop_range(address); return 0; }
int cuMemRelease(uint64_t handle) { close((int)handle - 1); return 0; }
int cuMemSetAccess(ptr_t address, size_t bytes, const void *access, size_t count) {
    (void)address; (void)bytes; (void)access; (void)count;
    CALL();
    return 0;
}

int cuStreamCreateWithPriority(stream_t **stream, unsigned flags, int priority) {
    (void)flags; (void)priority;
    CALL();
    *stream = calloc(1, sizeof **stream);
    (*stream)->next = now.streams;
    now.streams = *stream;
    return 0;
}
int cuStreamDestroy_v2(stream_t *stream) {
    for (stream_t **s = &now.streams; *s; s = &(*s)->next)
        if (*s == stream) { *s = stream->next; break; }
    free(stream->ops);
    free(stream);
    return 0;
}
int cuStreamSynchronize(stream_t *stream) {
    CALL();
    while (stream->count > 0 && !now.broken && !now.stalled) pump(1);
    return now.broken;
}
int cuStreamWaitEvent(stream_t *stream, event_t *event, unsigned flags) {
    (void)flags;
    CALL();
    return push(stream, (op_t){.kind = WAIT, .event = event, .number = event->recorded});
}
int cuStreamWriteValue32_v2(stream_t *stream, ptr_t address, uint32_t value, unsigned flags) {
    (void)flags;
    CALL();
    return push(stream, (op_t){.kind = WRITE, .to = address, .value = value});
}
int cuMemcpyAsync(ptr_t to, ptr_t from, size_t bytes, stream_t *stream) {
    CALL();
    return push(stream, (op_t){.kind = COPY, .from = from, .to = to, .bytes = bytes});
}
typedef struct { int order, from[2], to[2]; unsigned flags; } attributes_t;
int cuMemcpyBatchAsync_v2(ptr_t *to, ptr_t *from, size_t *bytes, size_t count, attributes_t *attributes, size_t *first,
                          size_t kinds, stream_t *stream) {
    CALL();
    if (!count || kinds != 1 || *first || attributes->order != 1) return 1;
    for (size_t i = 0; i < count; i++) {
        int failed = push(stream, (op_t){.kind = COPY, .from = from[i], .to = to[i], .bytes = bytes[i]});
        if (failed) return failed;
    }
    return 0;
}
int cuLaunchKernel(function_t *function, unsigned x, unsigned y, unsigned z, unsigned tx, unsigned ty, unsigned tz,
                   unsigned shared, stream_t *stream, void **arguments, void **extra) {
    (void)x; (void)y; (void)z; (void)tx; (void)ty; (void)tz; (void)shared; (void)extra;
    CALL();
    op_t op = {.kind = LAUNCH, .gathers = !strcmp(function->name, "larder_pages_to_blocks")};
    memcpy(&op.copy, arguments[0], sizeof op.copy);
    return push(stream, op);
}

int cuEventCreate(event_t **event, unsigned flags) { (void)flags; CALL(); *event = calloc(1, sizeof **event); return 0; }
int cuEventDestroy_v2(event_t *event) { (void)event; return 0; /* queues may still name it */ }
int cuEventRecord(event_t *event, stream_t *stream) {
    CALL();
    return push(stream, (op_t){.kind = RECORD, .event = event, .number = ++event->recorded});
}
int cuEventQuery(event_t *event) {
    CALL();
    hang();
    pump((int)chance(4));
    if (now.broken) return now.broken;
    return event->done >= event->recorded ? 0 : 600;
}
int cuEventElapsedTime_v2(float *milliseconds, event_t *from, event_t *to) { CALL(); *milliseconds = (to->at - from->at) / 1000; return 0; }

int cuModuleLoadData(void **module, const char *ptx) {
    CALL();
    *module = NULL;
    return strstr(ptx, ".entry larder_pages_to_blocks") ? 0 : 218;
}
int cuModuleUnload(void *module) { (void)module; return 0; }
int cuModuleGetFunction(function_t **function, void *module, const char *name) {
    static __thread function_t functions[2] = {{"larder_pages_to_blocks"}, {"larder_blocks_to_pages"}};
    (void)module;
    CALL();
    for (int i = 0; i < 2; i++)
        if (!strcmp(functions[i].name, name)) { *function = &functions[i]; return 0; }
    return 500;
}

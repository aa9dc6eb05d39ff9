/* The I/O thread: cuts requests into blocks, keeps the provider's queue full, and settles every completion.
 *
 * [Note: who owns what]  The engine's mutex guards the queue of requests, every request, every file, the counters and
 * the faults. The slots, one per block under way, belong to the I/O thread alone, and so does the provider's context.
 * The mutex is never held across a system call that does I/O.
 *
 * [Note: sleeping]  The thread sleeps in ppoll on one eventfd, to which submissions and completions both add. The
 * counter keeps what is added before the thread sleeps, so that no wake-up is lost and none has to be polled for.
 */
#define _GNU_SOURCE
#include "engine.h"

#include "faults.h"
#include "provider.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

enum {
    MAX_DEPTH = 256,
    MAX_RETRIES = 20,      /* of one block, without progress: about one second of EAGAIN */
    MAX_BACKOFF_SHIFT = 6, /* 64 ms */
};
static const int64_t BACKOFF_NS = 1000000;
static const int64_t NEVER = INT64_MAX;

struct zinf_file {
    zinf_engine *engine;
    int fd;
    size_t alignment;
    bool poisoned;
    unsigned requests; /* not done yet */
    pthread_cond_t unused;
};

struct zinf_request {
    zinf_engine *engine;
    zinf_file *file; /* NULL once done */
    int operation;
    char *address; /* these three: the part not yet cut into blocks */
    int64_t offset;
    size_t length;
    unsigned blocks; /* under way */
    zinf_outcome outcome;
    atomic_int done;
    atomic_int references; /* the engine's, until done, and the ticket's */
    pthread_cond_t finished;
    zinf_request *previous, *next; /* in the queue, while length > 0 */
    bool queued;
};

enum slot_state { FREE, READY, FLYING, HELD };

struct slot {
    struct zinf_block block; /* first: a provider's block is its slot. What is asked for in this attempt */
    size_t length;           /* what is left of the block */
    zinf_request *request;
    enum slot_state state;
    int retries;
    int64_t due; /* READY: not to be submitted before; HELD: not to be settled before */
};

struct zinf_engine {
    pthread_mutex_t mutex;
    pthread_t thread;
    pid_t process;
    const struct zinf_provider *provider;
    void *context;
    int wake;
    unsigned depth;
    size_t block_bytes;
    atomic_int references; /* the opener's, and one per request and file */
    bool stopping;
    zinf_request *head, *tail;
    zinf_counters counters;
    unsigned under_way[2];
    int64_t since[2];
    struct zinf_faults faults;
    unsigned used; /* slots that aren't FREE */
    struct slot slots[];
};

static const struct zinf_provider *const providers[] = {
    &zinf_provider_libaio,
    &zinf_provider_aio,
    &zinf_provider_threads,
    &zinf_provider_buffered,
};

static int64_t now_ns(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static void cond_init_monotonic(pthread_cond_t *cond)
{
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(cond, &attributes);
    pthread_condattr_destroy(&attributes);
}

static void wake(zinf_engine *engine)
{
    uint64_t one = 1;
    while (write(engine->wake, &one, sizeof one) < 0 && errno == EINTR)
        ;
}

static void engine_unref(zinf_engine *engine)
{
    if (atomic_fetch_sub(&engine->references, 1) > 1)
        return;
    pthread_mutex_destroy(&engine->mutex);
    free(engine);
}

static void request_unref(zinf_request *request)
{
    if (atomic_fetch_sub(&request->references, 1) > 1)
        return;
    zinf_engine *engine = request->engine;
    pthread_cond_destroy(&request->finished);
    free(request);
    engine_unref(engine);
}

/* The queue of requests with bytes that no block covers yet; under the mutex. */

static void enqueue(zinf_engine *engine, zinf_request *request, bool first)
{
    request->previous = first ? NULL : engine->tail;
    request->next = first ? engine->head : NULL;
    *(request->previous ? &request->previous->next : &engine->head) = request;
    *(request->next ? &request->next->previous : &engine->tail) = request;
    request->queued = true;
}

static void dequeue(zinf_engine *engine, zinf_request *request)
{
    *(request->previous ? &request->previous->next : &engine->head) = request->next;
    *(request->next ? &request->next->previous : &engine->tail) = request->previous;
    request->queued = false;
}

/* The life of a request; under the mutex. */

static void finish_if_complete(zinf_request *request)
{
    if (request->queued || request->blocks)
        return;
    zinf_file *file = request->file;
    request->file = NULL;
    if (--file->requests == 0)
        pthread_cond_broadcast(&file->unused);
    atomic_store_explicit(&request->done, 1, memory_order_release);
    pthread_cond_broadcast(&request->finished);
    request_unref(request);
}

static void fail(zinf_engine *engine, zinf_request *request, int error, int64_t offset, size_t length)
{
    if (!request->outcome.error)
        request->outcome = (zinf_outcome){.error = error, .offset = offset, .length = length};
    if (error == EIO)
        request->file->poisoned = true;
    if (request->queued)
        dequeue(engine, request);
}

/* Cuts blocks from the queue's head into free slots. */
static void fill_slots(zinf_engine *engine)
{
    pthread_mutex_lock(&engine->mutex);
    for (unsigned i = 0; i < engine->depth && engine->head; i++) {
        struct slot *slot = &engine->slots[i];
        if (slot->state != FREE)
            continue;
        while (engine->head && engine->head->file->poisoned) {
            zinf_request *poisoned = engine->head;
            fail(engine, poisoned, EIO, poisoned->offset, poisoned->length);
            poisoned->outcome.poisoned = 1;
            finish_if_complete(poisoned);
        }
        zinf_request *request = engine->head;
        if (!request)
            break;
        size_t length = request->length < engine->block_bytes ? request->length : engine->block_bytes;
        *slot = (struct slot){
            .block = {.operation = request->operation,
                      .fd = request->file->fd,
                      .address = request->address,
                      .offset = request->offset},
            .length = length,
            .request = request,
            .state = READY,
        };
        request->address += length;
        request->offset += (int64_t)length;
        request->length -= length;
        request->blocks++;
        if (!request->length)
            dequeue(engine, request);
        engine->used++;
        if (engine->under_way[request->operation]++ == 0)
            engine->since[request->operation] = now_ns();
    }
    pthread_mutex_unlock(&engine->mutex);
}

/* The block is over: with all its bytes, or with an error. */
static void end_block(zinf_engine *engine, struct slot *slot, int error)
{
    zinf_request *request = slot->request;
    int operation = request->operation;
    pthread_mutex_lock(&engine->mutex);
    request->blocks--;
    if (error)
        fail(engine, request, error, slot->block.offset, slot->length);
    if (--engine->under_way[operation] == 0) {
        uint64_t *busy = operation ? &engine->counters.write_ns : &engine->counters.read_ns;
        *busy += (uint64_t)(now_ns() - engine->since[operation]);
    }
    finish_if_complete(request);
    pthread_mutex_unlock(&engine->mutex);
    slot->state = FREE;
    engine->used--;
}

static void try_again(zinf_engine *engine, struct slot *slot, int error)
{
    if (slot->retries++ == MAX_RETRIES) {
        end_block(engine, slot, error);
        return;
    }
    int shift = slot->retries < MAX_BACKOFF_SHIFT ? slot->retries : MAX_BACKOFF_SHIFT;
    slot->state = READY;
    slot->due = error == EINTR ? 0 : now_ns() + (BACKOFF_NS << shift);
}

static void advance(zinf_engine *engine, struct slot *slot, size_t moved)
{
    pthread_mutex_lock(&engine->mutex);
    *(slot->request->operation ? &engine->counters.bytes_written : &engine->counters.bytes_read) += moved;
    pthread_mutex_unlock(&engine->mutex);
    slot->block.address = (char *)slot->block.address + moved;
    slot->block.offset += (int64_t)moved;
    slot->length -= moved;
    slot->retries = 0;
}

/* Every completion ends here: whole, short, to be retried, or failed. */
static void settle(zinf_engine *engine, struct slot *slot)
{
    int64_t result = slot->block.result;
    if (result == -EAGAIN || result == -EINTR) {
        try_again(engine, slot, (int)-result);
        return;
    }
    if (result < 0) {
        end_block(engine, slot, (int)-result);
        return;
    }
    size_t moved = (size_t)result;
    if (moved < slot->length) /* a direct transfer can go on only from an aligned place */
        moved -= moved % slot->request->file->alignment;
    if (moved) {
        advance(engine, slot, moved);
        if (slot->length)
            slot->state = READY;
        else
            end_block(engine, slot, 0);
    } else if (slot->request->operation == ZINF_READ) {
        end_block(engine, slot, ENODATA);
    } else {
        try_again(engine, slot, ENODATA);
    }
}

static bool hit_by_fault(zinf_engine *engine, int stage, const struct slot *slot, zinf_fault *fault)
{
    pthread_mutex_lock(&engine->mutex);
    bool hit = engine->faults.armed && zinf_faults_hit(&engine->faults, stage, slot->request->operation, fault);
    pthread_mutex_unlock(&engine->mutex);
    return hit;
}

/* One batch of what is ready. Its end is the queue's depth, or an injected fault. */
static bool submit_ready(zinf_engine *engine)
{
    struct zinf_block *batch[MAX_DEPTH];
    unsigned count = 0;
    bool progress = false;
    int64_t now = now_ns();
    for (unsigned i = 0; i < engine->depth; i++) {
        struct slot *slot = &engine->slots[i];
        zinf_fault fault;
        if (slot->state != READY || slot->due > now)
            continue;
        slot->block.length = slot->length;
        if (hit_by_fault(engine, ZINF_SUBMISSION, slot, &fault)) {
            progress = true;
            if (fault.error == EAGAIN || fault.error == EINTR)
                try_again(engine, slot, fault.error);
            else if (fault.error)
                end_block(engine, slot, fault.error);
            if (fault.error)
                continue;
            if (!fault.length)
                break;
            if (fault.length < slot->length)
                slot->block.length = fault.length;
        }
        batch[count++] = &slot->block;
    }
    unsigned done = 0;
    while (done < count) {
        int taken = engine->provider->submit(engine->context, batch + done, count - done);
        progress = true;
        if (taken > 0) {
            for (int i = 0; i < taken; i++)
                ((struct slot *)batch[done + (unsigned)i])->state = FLYING;
            done += (unsigned)taken;
            continue;
        }
        struct slot *slot = (struct slot *)batch[done++];
        if (taken == -EAGAIN || taken == -EINTR)
            try_again(engine, slot, -taken);
        else
            end_block(engine, slot, taken ? -taken : EIO);
    }
    return progress;
}

static bool reap(zinf_engine *engine)
{
    struct zinf_block *finished[MAX_DEPTH];
    int count = engine->provider->reap(engine->context, finished, engine->depth);
    for (int i = 0; i < count; i++) {
        struct slot *slot = (struct slot *)finished[i];
        zinf_fault fault;
        if (hit_by_fault(engine, ZINF_COMPLETION, slot, &fault)) {
            if (fault.error)
                slot->block.result = -fault.error;
            if (fault.delay_ns > 0) {
                slot->state = HELD;
                slot->due = now_ns() + fault.delay_ns;
                continue;
            }
        }
        settle(engine, slot);
    }
    return count > 0;
}

static bool settle_held(zinf_engine *engine)
{
    bool progress = false;
    int64_t now = now_ns();
    for (unsigned i = 0; i < engine->depth; i++) {
        struct slot *slot = &engine->slots[i];
        if (slot->state == HELD && slot->due <= now) {
            settle(engine, slot);
            progress = true;
        }
    }
    return progress;
}

/* [Note: sleeping] */
static void sleep_until_woken(zinf_engine *engine)
{
    int64_t due = NEVER;
    for (unsigned i = 0; i < engine->depth; i++) {
        struct slot *slot = &engine->slots[i];
        if ((slot->state == READY || slot->state == HELD) && slot->due < due)
            due = slot->due;
    }
    int64_t left = due == NEVER ? 0 : due - now_ns();
    if (left < 0)
        left = 0;
    struct timespec timeout = {.tv_sec = left / 1000000000, .tv_nsec = left % 1000000000};
    struct pollfd poll = {.fd = engine->wake, .events = POLLIN};
    if (ppoll(&poll, 1, due == NEVER ? NULL : &timeout, NULL) > 0) {
        uint64_t events;
        while (read(engine->wake, &events, sizeof events) < 0 && errno == EINTR)
            ;
    }
}

static bool finished(zinf_engine *engine)
{
    pthread_mutex_lock(&engine->mutex);
    bool result = engine->stopping && !engine->head && !engine->used;
    pthread_mutex_unlock(&engine->mutex);
    return result;
}

static void *run(void *argument)
{
    zinf_engine *engine = argument;
    while (!finished(engine)) {
        fill_slots(engine);
        bool progress = submit_ready(engine);
        progress |= reap(engine);
        progress |= settle_held(engine);
        if (!progress)
            sleep_until_woken(engine);
    }
    return NULL;
}

const char *zinf_provider_name(int index)
{
    return index >= 0 && (size_t)index < sizeof providers / sizeof *providers ? providers[index]->name : NULL;
}

static const struct zinf_provider *find_provider(const char *name)
{
    for (size_t i = 0; i < sizeof providers / sizeof *providers; i++)
        if (!strcmp(providers[i]->name, name))
            return providers[i];
    return NULL;
}

int zinf_provider_is_direct(const char *name)
{
    const struct zinf_provider *provider = find_provider(name);
    return provider ? provider->direct : -EINVAL;
}

/* The provider and the thread. Signals are the caller's business: no thread of the engine takes one. */
static int start(zinf_engine *engine)
{
    sigset_t all, before;
    sigfillset(&all);
    int error = -pthread_sigmask(SIG_SETMASK, &all, &before);
    if (error)
        return error;
    error = engine->provider->open(engine->depth, engine->wake, &engine->context);
    if (!error) {
        error = zinf_setup_fault();
        if (!error)
            error = -pthread_create(&engine->thread, NULL, run, engine);
        if (error)
            engine->provider->close(engine->context);
        else
            pthread_setname_np(engine->thread, "zinf-io");
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error;
}

int zinf_engine_open(const char *name, unsigned depth, size_t block_bytes, zinf_engine **out)
{
    const struct zinf_provider *provider = find_provider(name);
    if (!provider || depth < 1 || depth > MAX_DEPTH || block_bytes < 4096 || block_bytes % 4096)
        return -EINVAL;
    int error = zinf_setup_fault();
    if (error)
        return error;
    zinf_engine *engine = calloc(1, sizeof *engine + depth * sizeof *engine->slots);
    if (!engine)
        return -ENOMEM;
    engine->provider = provider;
    engine->depth = depth;
    engine->block_bytes = block_bytes;
    engine->process = getpid();
    atomic_init(&engine->references, 1);
    pthread_mutex_init(&engine->mutex, NULL);
    engine->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    error = engine->wake < 0 ? -errno : start(engine);
    if (error) {
        if (engine->wake >= 0)
            close(engine->wake);
        engine_unref(engine);
        return error;
    }
    *out = engine;
    return 0;
}

int zinf_engine_close(zinf_engine *engine, zinf_counters *last)
{
    if (engine->process != getpid())
        return -ECHILD;
    pthread_mutex_lock(&engine->mutex);
    engine->stopping = true;
    wake(engine);
    pthread_mutex_unlock(&engine->mutex);
    int error = -pthread_join(engine->thread, NULL);
    if (error)
        return error;
    engine->provider->close(engine->context);
    close(engine->wake);
    zinf_engine_counters(engine, last);
    engine_unref(engine);
    return 0;
}

void zinf_engine_counters(zinf_engine *engine, zinf_counters *out)
{
    pthread_mutex_lock(&engine->mutex);
    *out = engine->counters;
    out->faults_fired = engine->faults.fired;
    pthread_mutex_unlock(&engine->mutex);
}

int zinf_file_attach(zinf_engine *engine, int fd, size_t alignment, zinf_file **out)
{
    zinf_file *file = calloc(1, sizeof *file);
    if (!file)
        return -ENOMEM;
    file->engine = engine;
    file->fd = fd;
    file->alignment = alignment ? alignment : 1;
    cond_init_monotonic(&file->unused);
    atomic_fetch_add(&engine->references, 1);
    *out = file;
    return 0;
}

int zinf_file_detach(zinf_file *file)
{
    zinf_engine *engine = file->engine;
    if (engine->process != getpid())
        return -ECHILD;
    pthread_mutex_lock(&engine->mutex);
    while (file->requests)
        pthread_cond_wait(&file->unused, &engine->mutex);
    pthread_mutex_unlock(&engine->mutex);
    pthread_cond_destroy(&file->unused);
    free(file);
    engine_unref(engine);
    return 0;
}

int zinf_submit(zinf_file *file, int operation, void *address, int64_t offset, size_t length, zinf_request **out)
{
    zinf_engine *engine = file->engine;
    if (engine->process != getpid())
        return -ECHILD;
    if ((operation != ZINF_READ && operation != ZINF_WRITE) || offset < 0 || !length)
        return -EINVAL;
    zinf_request *request = calloc(1, sizeof *request);
    if (!request)
        return -ENOMEM;
    request->engine = engine;
    request->file = file;
    request->operation = operation;
    request->address = address;
    request->offset = offset;
    request->length = length;
    atomic_init(&request->references, 2);
    cond_init_monotonic(&request->finished);
    atomic_fetch_add(&engine->references, 1);
    pthread_mutex_lock(&engine->mutex);
    bool stopping = engine->stopping;
    if (!stopping) {
        file->requests++;
        enqueue(engine, request, false);
        wake(engine);
    }
    pthread_mutex_unlock(&engine->mutex);
    if (stopping) {
        atomic_store(&request->references, 1);
        request_unref(request);
        return -ESHUTDOWN;
    }
    *out = request;
    return 0;
}

int zinf_done(zinf_request *request)
{
    return atomic_load_explicit(&request->done, memory_order_acquire);
}

int zinf_wait(zinf_request *request, int64_t timeout_ns)
{
    zinf_engine *engine = request->engine;
    if (zinf_done(request))
        return 0;
    if (engine->process != getpid())
        return -ECHILD;
    int64_t until = timeout_ns < 0 ? 0 : now_ns() + timeout_ns;
    struct timespec deadline = {.tv_sec = until / 1000000000, .tv_nsec = until % 1000000000};
    int error = 0;
    pthread_mutex_lock(&engine->mutex);
    if (request->queued && request != engine->head) {
        dequeue(engine, request);
        enqueue(engine, request, true);
    }
    while (!zinf_done(request) && !error)
        error = timeout_ns < 0 ? pthread_cond_wait(&request->finished, &engine->mutex)
                               : pthread_cond_timedwait(&request->finished, &engine->mutex, &deadline);
    if (zinf_done(request))
        error = 0;
    pthread_mutex_unlock(&engine->mutex);
    return -error;
}

void zinf_result(zinf_request *request, zinf_outcome *out)
{
    *out = request->outcome;
}

void zinf_release(zinf_request *request)
{
    request_unref(request);
}

int zinf_inject(zinf_engine *engine, const zinf_fault *fault)
{
    pthread_mutex_lock(&engine->mutex);
    int error = zinf_faults_add(&engine->faults, fault);
    pthread_mutex_unlock(&engine->mutex);
    return error;
}

void zinf_clear_faults(zinf_engine *engine)
{
    pthread_mutex_lock(&engine->mutex);
    engine->faults.armed = 0;
    pthread_mutex_unlock(&engine->mutex);
}

int zinf_direct_alignment(int fd, int64_t *memory, int64_t *offset)
{
    *memory = 0;
    *offset = 0;
#ifdef STATX_DIOALIGN
    struct statx answer;
    if (statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &answer) < 0)
        return -errno;
    if (answer.stx_mask & STATX_DIOALIGN) {
        *memory = answer.stx_dio_mem_align ? (int64_t)answer.stx_dio_mem_align : -1;
        *offset = answer.stx_dio_offset_align ? (int64_t)answer.stx_dio_offset_align : -1;
    }
#else
    (void)fd;
#endif
    return 0;
}

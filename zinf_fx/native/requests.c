/* Requests and files: what the users of the engine hold. */
#include "state.h"

#include <errno.h>
#include <stdlib.h>
#include <unistd.h>

void zinf_release(zinf_request *request)
{
    if (atomic_fetch_sub(&request->references, 1) > 1)
        return;
    zinf_engine *engine = request->engine;
    pthread_cond_destroy(&request->finished);
    free(request);
    zinf_engine_unref(engine);
}

void zinf_dequeue(zinf_engine *engine, zinf_request *request)
{
    TAILQ_REMOVE(&engine->queue, request, neighbours);
    request->queued = false;
}

void zinf_request_finish(zinf_request *request)
{
    if (request->queued || request->blocks)
        return;
    zinf_file *file = request->file;
    request->file = NULL;
    if (--file->requests == 0)
        pthread_cond_broadcast(&file->unused);
    request->outcome.ended_ns = zinf_now_ns();
    if (!request->outcome.began_ns)
        request->outcome.began_ns = request->outcome.ended_ns;
    atomic_store_explicit(&request->done, 1, memory_order_release);
    pthread_cond_broadcast(&request->finished);
    zinf_release(request);
}

void zinf_request_fail(zinf_request *request, int error, int64_t offset, size_t length)
{
    zinf_outcome *outcome = &request->outcome;
    if (!outcome->error || offset < outcome->offset)
        *outcome = (zinf_outcome){.error = error, .offset = offset, .length = length, .began_ns = outcome->began_ns};
    if (error == EIO)
        request->file->poisoned = true;
    if (request->queued)
        zinf_dequeue(request->engine, request);
}

int zinf_file_attach(zinf_engine *engine, int fd, size_t alignment, zinf_file **out)
{
    zinf_file *file = calloc(1, sizeof *file);
    if (!file)
        return -ENOMEM;
    file->engine = engine;
    file->fd = fd;
    file->alignment = alignment ? alignment : 1;
    zinf_cond_init(&file->unused);
    atomic_fetch_add(&engine->references, 1);
    *out = file;
    return 0;
}

/* Waits until `condition` is signalled or the deadline is over (< 0: for ever). The engine's mutex is held. */
static int wait_until(zinf_engine *engine, pthread_cond_t *condition, int64_t deadline_ns)
{
    struct timespec deadline = {.tv_sec = deadline_ns / 1000000000, .tv_nsec = deadline_ns % 1000000000};
    return deadline_ns < 0 ? pthread_cond_wait(condition, &engine->mutex)
                           : pthread_cond_timedwait(condition, &engine->mutex, &deadline);
}

static int64_t deadline_in(int64_t timeout_ns)
{
    return timeout_ns < 0 ? -1 : zinf_now_ns() + timeout_ns;
}

int zinf_file_detach(zinf_file *file, int64_t timeout_ns)
{
    zinf_engine *engine = file->engine;
    if (engine->process != getpid())
        return -ECHILD;
    int64_t deadline = deadline_in(timeout_ns);
    int error = 0;
    pthread_mutex_lock(&engine->mutex);
    while (file->requests && !error)
        error = wait_until(engine, &file->unused, deadline);
    bool used = file->requests;
    pthread_mutex_unlock(&engine->mutex);
    if (used)
        return -error;
    pthread_cond_destroy(&file->unused);
    free(file);
    zinf_engine_unref(engine);
    return 0;
}

/* A read goes before the writes behind the last read: what it brings is waited for, and room seldom. */
static void enqueue(zinf_engine *engine, zinf_request *request)
{
    zinf_request *before = TAILQ_LAST(&engine->queue, zinf_requests);
    while (before && request->operation == ZINF_READ && before->operation == ZINF_WRITE)
        before = TAILQ_PREV(before, zinf_requests, neighbours);
    if (before)
        TAILQ_INSERT_AFTER(&engine->queue, before, request, neighbours);
    else
        TAILQ_INSERT_HEAD(&engine->queue, request, neighbours);
    request->queued = true;
}

int zinf_submit(zinf_file *file, int operation, void *address, int64_t offset, size_t length, uint32_t *sums,
                uint64_t generation, zinf_request **out)
{
    zinf_engine *engine = file->engine;
    if (engine->process != getpid())
        return -ECHILD;
    if ((operation != ZINF_READ && operation != ZINF_WRITE) || offset < 0 || !length ||
        (sums && (offset % ZINF_PAGE || length % ZINF_PAGE)))
        return -EINVAL;
    zinf_request *request = calloc(1, sizeof *request);
    if (!request)
        return -ENOMEM;
    *request = (zinf_request){
        .engine = engine,
        .file = file,
        .operation = operation,
        .address = address,
        .offset = offset,
        .length = length,
        .sums = sums,
        .generation = generation,
        .references = 2,
    };
    zinf_cond_init(&request->finished);
    atomic_fetch_add(&engine->references, 1);
    pthread_mutex_lock(&engine->mutex);
    bool stopping = engine->stopping;
    if (!stopping) {
        file->requests++;
        enqueue(engine, request);
        engine->submissions++;
        if (engine->sleeping) {
            engine->sleeping = false; /* one wake-up is enough for all that come before it looks */
            zinf_wake(engine->wake);
        }
    }
    pthread_mutex_unlock(&engine->mutex);
    if (stopping) {
        atomic_store(&request->references, 1);
        zinf_release(request);
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
    int64_t deadline = deadline_in(timeout_ns);
    int error = 0;
    pthread_mutex_lock(&engine->mutex);
    if (request->queued) {
        TAILQ_REMOVE(&engine->queue, request, neighbours);
        TAILQ_INSERT_HEAD(&engine->queue, request, neighbours);
    }
    while (!zinf_done(request) && !error)
        error = wait_until(engine, &request->finished, deadline);
    if (zinf_done(request))
        error = 0;
    pthread_mutex_unlock(&engine->mutex);
    return -error;
}

void zinf_result(zinf_request *request, zinf_outcome *out)
{
    *out = request->outcome;
}

/* The I/O thread: cuts requests into blocks, keeps the provider's queue full, and settles every completion.
 *
 * [Note: sleeping]  The thread sleeps in ppoll on one eventfd, to which submissions and completions both add. The
 * counter keeps what is added before the thread sleeps, so that no wake-up is lost and none has to be polled for.
 */
#define _GNU_SOURCE
#include "state.h"

#include <errno.h>
#include <poll.h>
#include <time.h>
#include <unistd.h>

enum {
    MAX_RETRIES = 20,      /* of one block, without progress: about one second of EAGAIN */
    MAX_BACKOFF_SHIFT = 6, /* 64 ms */
};
static const int64_t BACKOFF_NS = 1000000;
static const int64_t NEVER = INT64_MAX;

/* Cuts blocks from the queue's head into free slots. Whether the queue changed. */
static bool fill_slots(zinf_engine *engine)
{
    bool progress = false;
    pthread_mutex_lock(&engine->mutex);
    for (unsigned i = 0; i < engine->depth && engine->head; i++) {
        struct slot *slot = &engine->slots[i];
        if (slot->state != FREE)
            continue;
        progress = true;
        while (engine->head && engine->head->file->poisoned) {
            zinf_request *poisoned = engine->head;
            zinf_request_fail(poisoned, EIO, poisoned->offset, poisoned->length);
            poisoned->outcome.poisoned = 1;
            zinf_request_finish(poisoned);
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
            zinf_dequeue(engine, request);
        engine->used++;
        if (engine->under_way[request->operation]++ == 0)
            engine->since[request->operation] = zinf_now_ns();
    }
    pthread_mutex_unlock(&engine->mutex);
    return progress;
}

/* The block is over: with all its bytes, or with an error. */
static void end_block(zinf_engine *engine, struct slot *slot, int error)
{
    zinf_request *request = slot->request;
    int operation = request->operation;
    pthread_mutex_lock(&engine->mutex);
    request->blocks--;
    if (error)
        zinf_request_fail(request, error, slot->block.offset, slot->length);
    if (--engine->under_way[operation] == 0) {
        uint64_t *busy = operation ? &engine->counters.write_ns : &engine->counters.read_ns;
        *busy += (uint64_t)(zinf_now_ns() - engine->since[operation]);
    }
    zinf_request_finish(request);
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
    slot->due = error == EINTR ? 0 : zinf_now_ns() + (BACKOFF_NS << shift);
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
    struct zinf_block *batch[ZINF_MAX_DEPTH];
    unsigned count = 0;
    bool progress = false;
    int64_t now = zinf_now_ns();
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

/* The provider can't tell what became of its blocks. Nobody may wait for them for ever. */
static void abandon_flying(zinf_engine *engine, int error)
{
    for (unsigned i = 0; i < engine->depth; i++)
        if (engine->slots[i].state == FLYING)
            end_block(engine, &engine->slots[i], error);
}

static bool reap(zinf_engine *engine)
{
    struct zinf_block *finished[ZINF_MAX_DEPTH];
    int count = engine->provider->reap(engine->context, finished, engine->depth);
    if (count < 0)
        abandon_flying(engine, -count);
    for (int i = 0; i < count; i++) {
        struct slot *slot = (struct slot *)finished[i];
        zinf_fault fault;
        if (hit_by_fault(engine, ZINF_COMPLETION, slot, &fault)) {
            if (fault.error)
                slot->block.result = -fault.error;
            if (fault.delay_ns > 0) {
                slot->state = HELD;
                slot->due = zinf_now_ns() + fault.delay_ns;
                continue;
            }
        }
        settle(engine, slot);
    }
    return count != 0;
}

static bool settle_held(zinf_engine *engine)
{
    bool progress = false;
    int64_t now = zinf_now_ns();
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
    int64_t left = due == NEVER ? 0 : due - zinf_now_ns();
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

void *zinf_io_thread(void *argument)
{
    zinf_engine *engine = argument;
    while (!finished(engine)) {
        bool progress = fill_slots(engine);
        progress |= submit_ready(engine);
        progress |= reap(engine);
        progress |= settle_held(engine);
        if (!progress)
            sleep_until_woken(engine);
    }
    return NULL;
}

/* The I/O thread: keeps the provider's queue full, and settles every completion.
 *
 * [Note: sleeping]  The thread sleeps in ppoll on one eventfd, to which submissions and completions both add. The
 * counter keeps what is added before the thread sleeps, so that no wake-up is lost and none has to be polled for. A
 * submission adds only while the thread has declared, under the mutex, that it has seen every one before.
 */
#define _GNU_SOURCE
#include "blocks.h"
#include "merging.h"

#include <errno.h>
#include <poll.h>
#include <time.h>
#include <unistd.h>

static const int64_t NEVER = INT64_MAX;

/* Whether the limits on what is under way leave room for one more block. */
static bool fits(const zinf_engine *engine, size_t bytes, unsigned count, size_t length)
{
    count += engine->flying;
    return !count || (count < engine->most && engine->flying_bytes + bytes + length <= engine->bytes_limit);
}

/* The blocks that are ready, as transfers: at most as many as fit. */
static unsigned collect_ready(zinf_engine *engine, struct zinf_block **batch)
{
    struct slot *first = NULL, *last = NULL;
    unsigned count = 0, blocks = 0;
    size_t bytes = 0;
    int64_t now = zinf_now_ns();
    for (unsigned i = 0; i < engine->slot_count; i++) {
        struct slot *slot = zinf_slot(engine, i);
        if (slot->state != READY || slot->due > now)
            continue;
        if (!fits(engine, bytes, blocks, slot->length))
            break;
        slot->block.length = slot->length;
        blocks++;
        bytes += slot->length;
        if (!first || !zinf_join_transfer(first, last, slot)) {
            first = slot;
            zinf_begin_transfer(first);
            batch[count++] = &first->block;
        }
        last = slot;
    }
    return count;
}

/* The transfer wasn't taken: every block of it finds out by itself why. */
static void refuse(zinf_engine *engine, struct slot *first, int error)
{
    first->block.result = error ? error : -EIO;
    zinf_share_result(first);
    for (struct slot *slot = first, *next; slot; slot = next) {
        next = slot->mate;
        zinf_settle(engine, slot);
    }
}

static bool submit_ready(zinf_engine *engine)
{
    struct zinf_block *batch[ZINF_MAX_DEPTH];
    unsigned count = collect_ready(engine, batch);
    for (unsigned done = 0; done < count;) {
        int taken = engine->provider->submit(engine->context, batch + done, count - done);
        if (taken <= 0) {
            refuse(engine, (struct slot *)batch[done++], taken);
            continue;
        }
        for (int i = 0; i < taken; i++)
            for (struct slot *slot = (struct slot *)batch[done + (unsigned)i]; slot; slot = slot->mate)
                zinf_take_off(engine, slot);
        done += (unsigned)taken;
        pthread_mutex_lock(&engine->mutex);
        engine->counters.transfers += (uint64_t)taken;
        pthread_mutex_unlock(&engine->mutex);
    }
    return count > 0;
}

/* The provider can't tell what became of its blocks. Nobody may wait for them for ever. */
static void abandon_flying(zinf_engine *engine, int error)
{
    for (unsigned i = 0; i < engine->slot_count; i++)
        if (engine->slots[i].state == FLYING)
            zinf_end_block(engine, &engine->slots[i], error);
}

static bool reap(zinf_engine *engine)
{
    struct zinf_block *finished[ZINF_MAX_DEPTH];
    if (!engine->flying)
        return false;
    int count = engine->provider->reap(engine->context, finished, engine->most);
    if (count < 0)
        abandon_flying(engine, -count);
    for (int i = 0; i < count; i++) {
        zinf_share_result((struct slot *)finished[i]);
        for (struct slot *slot = (struct slot *)finished[i], *next; slot; slot = next) {
            next = slot->mate;
            zinf_settle(engine, slot);
        }
    }
    return count != 0;
}

/* The time of the next thing to do, if no event comes earlier. A block that is ready and overdue waits for room, and room
 * comes with a completion. */
static int64_t next_due(zinf_engine *engine)
{
    int64_t due = NEVER, now = zinf_now_ns();
    for (unsigned i = 0; i < engine->slot_count; i++) {
        struct slot *slot = &engine->slots[i];
        bool timed = slot->state == READY && (slot->due > now || !engine->flying);
        if (timed && slot->due < due)
            due = slot->due;
    }
    return due;
}

/* [Note: sleeping] */
static void sleep_until_woken(zinf_engine *engine)
{
    pthread_mutex_lock(&engine->mutex);
    engine->sleeping = engine->submissions == engine->seen;
    bool sleeping = engine->sleeping;
    pthread_mutex_unlock(&engine->mutex);
    if (!sleeping)
        return;
    int64_t due = next_due(engine);
    int64_t now = zinf_now_ns(), left = due > now ? due - now : 0;
    struct timespec timeout = {.tv_sec = left / 1000000000, .tv_nsec = left % 1000000000};
    struct pollfd poll = {.fd = engine->wake, .events = POLLIN};
    if (ppoll(&poll, 1, due == NEVER ? NULL : &timeout, NULL) > 0) {
        uint64_t events;
        while (read(engine->wake, &events, sizeof events) < 0 && errno == EINTR)
            ;
    }
    pthread_mutex_lock(&engine->mutex);
    engine->sleeping = false;
    pthread_mutex_unlock(&engine->mutex);
}

static bool finished(zinf_engine *engine)
{
    pthread_mutex_lock(&engine->mutex);
    bool result = engine->stopping && TAILQ_EMPTY(&engine->queue) && !engine->used;
    pthread_mutex_unlock(&engine->mutex);
    return result;
}

void *zinf_io_thread(void *argument)
{
    zinf_engine *engine = argument;
    while (!finished(engine)) {
        bool progress = zinf_cut_blocks(engine);
        progress |= submit_ready(engine);
        progress |= reap(engine);
        progress |= submit_ready(engine); /* what reaping made room for, before the checksums take their time */
        progress |= zinf_work_on_checksums(engine);
        if (!progress)
            sleep_until_woken(engine);
    }
    return NULL;
}

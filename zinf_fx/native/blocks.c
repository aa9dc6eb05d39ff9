#include "blocks.h"

#include "merging.h"

#include <errno.h>

enum {
    MAX_RETRIES = 20,      /* of one block, without progress: about one second of EAGAIN */
    MAX_BACKOFF_SHIFT = 6, /* 64 ms */
    IN_ADVANCE = 2,        /* blocks */
};
static const int64_t BACKOFF_NS = 1000000;
static const size_t CHECKSUM_PORTION = 1 << 20;

struct slot *zinf_slot(zinf_engine *engine, unsigned i)
{
    return &engine->slots[(engine->next_slot + i) % engine->slot_count];
}

static bool may_cut(zinf_engine *engine)
{
    return !TAILQ_EMPTY(&engine->queue) && engine->cut < engine->most + IN_ADVANCE &&
           engine->cut_bytes < engine->bytes_limit + IN_ADVANCE * engine->block_bytes;
}

static void uncount(zinf_engine *engine, struct slot *slot)
{
    engine->cut--;
    engine->cut_bytes -= slot->whole;
}

/* Under the mutex. */
static void cut_block(zinf_engine *engine, struct slot *slot)
{
    zinf_request *request = TAILQ_FIRST(&engine->queue);
    size_t length = request->length < engine->block_bytes ? request->length : engine->block_bytes;
    *slot = (struct slot){
        .block = {.operation = request->operation,
                  .fd = request->file->fd,
                  .address = request->address,
                  .offset = request->offset},
        .length = length,
        .request = request,
        .state = request->sums && request->operation == ZINF_WRITE ? SUMMING : READY,
        .whole = length,
        .sums = request->sums,
    };
    request->address += length;
    request->offset += (int64_t)length;
    request->length -= length;
    if (request->sums)
        request->sums += length / ZINF_PAGE;
    request->blocks++;
    if (!request->length)
        zinf_dequeue(engine, request);
    engine->used++;
    engine->cut++;
    engine->cut_bytes += length;
    int64_t now = zinf_now_ns();
    if (!request->outcome.began_ns)
        request->outcome.began_ns = now;
    if (engine->under_way[slot->block.operation]++ == 0)
        engine->since[slot->block.operation] = now;
}

/* Under the mutex: the queue's head is then of a file that may be used. Whether the queue changed. */
static bool drop_poisoned(zinf_engine *engine)
{
    bool progress = false;
    zinf_request *poisoned;
    while ((poisoned = TAILQ_FIRST(&engine->queue)) && poisoned->file->poisoned) {
        zinf_request_fail(poisoned, EIO, poisoned->offset, poisoned->length);
        poisoned->outcome.poisoned = 1;
        zinf_request_finish(poisoned);
        progress = true;
    }
    return progress;
}

bool zinf_cut_blocks(zinf_engine *engine)
{
    pthread_mutex_lock(&engine->mutex);
    engine->seen = engine->submissions;
    bool progress = drop_poisoned(engine);
    for (unsigned i = 0; i < engine->slot_count && may_cut(engine); i++) {
        struct slot *slot = &engine->slots[engine->next_slot];
        engine->next_slot = (engine->next_slot + 1) % engine->slot_count;
        if (slot->state == FREE) {
            cut_block(engine, slot);
            drop_poisoned(engine);
            progress = true;
        }
    }
    pthread_mutex_unlock(&engine->mutex);
    return progress;
}

void zinf_take_off(zinf_engine *engine, struct slot *slot)
{
    slot->state = FLYING;
    slot->flying = slot->block.length;
    engine->flying++;
    engine->flying_bytes += slot->flying;
}

static void land(zinf_engine *engine, struct slot *slot)
{
    if (slot->state != FLYING)
        return;
    slot->state = READY;
    engine->flying--;
    engine->flying_bytes -= slot->flying;
}

void zinf_end_block(zinf_engine *engine, struct slot *slot, int error)
{
    land(engine, slot);
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
    if (slot->state != CHECKING)
        uncount(engine, slot);
    slot->state = FREE;
    engine->used--;
}

/* After a pause that grows, until too often. */
static void try_again(zinf_engine *engine, struct slot *slot, int error)
{
    if (slot->retries++ == MAX_RETRIES) {
        zinf_end_block(engine, slot, error);
        return;
    }
    int shift = slot->retries < MAX_BACKOFF_SHIFT ? slot->retries : MAX_BACKOFF_SHIFT;
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

static void all_moved(zinf_engine *engine, struct slot *slot)
{
    if (slot->sums && slot->request->operation == ZINF_READ) {
        slot->state = CHECKING;
        uncount(engine, slot);
    } else {
        zinf_end_block(engine, slot, 0);
    }
}

void zinf_settle(zinf_engine *engine, struct slot *slot)
{
    int64_t result = slot->block.result;
    land(engine, slot);
    if (result == ZINF_NOT_TRIED) {
        slot->alone = true;
        return;
    }
    if (result == -EAGAIN || result == -EINTR) {
        try_again(engine, slot, (int)-result);
        return;
    }
    if (result < 0) {
        zinf_end_block(engine, slot, (int)-result);
        return;
    }
    size_t moved = (size_t)result;
    if (moved < slot->length) /* a direct transfer can go on only from an aligned place */
        moved -= moved % slot->request->file->alignment;
    if (moved) {
        advance(engine, slot, moved);
        if (!slot->length)
            all_moved(engine, slot);
    } else if (slot->request->operation == ZINF_READ) {
        zinf_end_block(engine, slot, ENODATA);
    } else {
        try_again(engine, slot, ENODATA);
    }
}

/* Before a write and after a read: none or all of the block has moved. */
static void sum_or_check(zinf_engine *engine, struct slot *slot)
{
    size_t intact = slot->whole, moved = slot->whole - slot->length;
    const char *data = (const char *)slot->block.address - moved;
    int64_t offset = slot->block.offset - (int64_t)moved, began = zinf_now_ns();
    if (slot->state == SUMMING)
        zinf_page_sums(data, slot->whole, offset, slot->request->generation, slot->sums);
    else
        intact = zinf_pages_intact(data, slot->whole, offset, slot->request->generation, slot->sums);
    pthread_mutex_lock(&engine->mutex);
    engine->counters.bytes_checked += slot->whole;
    engine->counters.check_ns += (uint64_t)(zinf_now_ns() - began);
    pthread_mutex_unlock(&engine->mutex);
    if (slot->state == SUMMING) {
        slot->state = READY;
        return;
    }
    slot->block.offset = offset + (int64_t)intact;
    slot->length = ZINF_PAGE; /* of what failed, if anything did */
    zinf_end_block(engine, slot, intact == slot->whole ? 0 : EBADMSG);
}

bool zinf_work_on_checksums(zinf_engine *engine)
{
    size_t bytes = 0;
    for (unsigned i = 0; i < engine->slot_count && bytes < CHECKSUM_PORTION; i++) {
        struct slot *slot = zinf_slot(engine, i);
        if (slot->state != SUMMING && slot->state != CHECKING)
            continue;
        bytes += slot->whole;
        sum_or_check(engine, slot);
    }
    return bytes > 0;
}

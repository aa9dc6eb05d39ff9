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
    return engine->head && engine->cut < engine->most + IN_ADVANCE &&
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
    zinf_request *request = engine->head;
    size_t length = request->length < engine->block_bytes ? request->length : engine->block_bytes;
    *slot = (struct slot){
        .block = {.operation = request->operation,
                  .fd = request->file->fd,
                  .address = request->address,
                  .offset = request->offset},
        .length = length,
        .request = request,
        .state = request->sums && request->operation == ZINF_WRITE ? SUMMING : READY,
        .address = request->address,
        .offset = request->offset,
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
    if (!request->began_ns)
        request->began_ns = now;
    if (engine->under_way[slot->block.operation]++ == 0)
        engine->since[slot->block.operation] = now;
}

/* Under the mutex: the queue's head is then of a file that may be used. Whether the queue changed. */
static bool drop_poisoned(zinf_engine *engine)
{
    bool progress = false;
    while (engine->head && engine->head->file->poisoned) {
        zinf_request *poisoned = engine->head;
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

void zinf_land(zinf_engine *engine, struct slot *slot)
{
    engine->flying--;
    engine->flying_bytes -= slot->flying;
}

void zinf_end_block(zinf_engine *engine, struct slot *slot, int error)
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
    if (slot->state != CHECKING)
        uncount(engine, slot);
    slot->state = FREE;
    engine->used--;
}

void zinf_try_again(zinf_engine *engine, struct slot *slot, int error)
{
    if (slot->retries++ == MAX_RETRIES) {
        zinf_end_block(engine, slot, error);
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
    if (result == ZINF_NOT_TRIED) {
        slot->state = READY;
        slot->alone = true;
        return;
    }
    if (result == -EAGAIN || result == -EINTR) {
        zinf_try_again(engine, slot, (int)-result);
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
        slot->state = READY;
        if (!slot->length)
            all_moved(engine, slot);
    } else if (slot->request->operation == ZINF_READ) {
        zinf_end_block(engine, slot, ENODATA);
    } else {
        zinf_try_again(engine, slot, ENODATA);
    }
}

static void count_checked(zinf_engine *engine, size_t bytes, int64_t began)
{
    pthread_mutex_lock(&engine->mutex);
    engine->counters.bytes_checked += bytes;
    engine->counters.check_ns += (uint64_t)(zinf_now_ns() - began);
    pthread_mutex_unlock(&engine->mutex);
}

static void sum(zinf_engine *engine, struct slot *slot)
{
    int64_t began = zinf_now_ns();
    zinf_page_sums(slot->address, slot->whole, slot->offset, slot->request->generation, slot->sums);
    count_checked(engine, slot->whole, began);
    slot->state = READY;
}

static void check(zinf_engine *engine, struct slot *slot)
{
    int64_t began = zinf_now_ns();
    size_t intact =
        zinf_pages_intact(slot->address, slot->whole, slot->offset, slot->request->generation, slot->sums);
    bool whole = intact == slot->whole;
    count_checked(engine, slot->whole, began);
    slot->block.offset = slot->offset + (int64_t)intact;
    slot->length = whole ? 0 : ZINF_PAGE;
    zinf_end_block(engine, slot, whole ? 0 : EBADMSG);
}

bool zinf_work_on_checksums(zinf_engine *engine)
{
    size_t bytes = 0;
    for (unsigned i = 0; i < engine->slot_count && bytes < CHECKSUM_PORTION; i++) {
        struct slot *slot = zinf_slot(engine, i);
        if (slot->state != SUMMING && slot->state != CHECKING)
            continue;
        bytes += slot->whole;
        if (slot->state == SUMMING)
            sum(engine, slot);
        else
            check(engine, slot);
    }
    return bytes > 0;
}

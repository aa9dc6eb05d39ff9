#include "merging.h"

#include <errno.h>

static const size_t LARGEST_TRANSFER = 1 << 20; /* bytes: larger ones gain nothing */

void zinf_begin_transfer(struct slot *first)
{
    struct zinf_block *block = &first->block;
    block->parts = first->parts;
    block->parts[0] = (struct iovec){block->address, block->length};
    block->count = 1;
    first->transfer = block->length;
    first->mate = NULL;
}

bool zinf_join_transfer(struct slot *first, struct slot *last, struct slot *slot)
{
    struct zinf_block *block = &first->block;
    if (first->alone || slot->alone || block->count == ZINF_MERGED)
        return false;
    if (block->fd != slot->block.fd || block->operation != slot->block.operation)
        return false;
    if (block->offset + (int64_t)first->transfer != slot->block.offset ||
        first->transfer + slot->length > LARGEST_TRANSFER)
        return false;
    block->parts[block->count++] = (struct iovec){slot->block.address, slot->length};
    first->transfer += slot->length;
    last->mate = slot;
    slot->mate = NULL;
    return true;
}

void zinf_share_result(struct slot *first)
{
    int64_t left = first->block.result;
    if (!first->mate)
        return;
    if (left < 0) {
        for (struct slot *slot = first; slot; slot = slot->mate)
            slot->block.result = left == -EIO ? left : ZINF_NOT_TRIED;
        return;
    }
    for (struct slot *slot = first; slot; slot = slot->mate) {
        int64_t length = (int64_t)slot->length;
        bool reached = left > 0 || slot == first;
        slot->block.result = reached ? (left < length ? left : length) : ZINF_NOT_TRIED;
        left -= reached ? slot->block.result : 0;
    }
}

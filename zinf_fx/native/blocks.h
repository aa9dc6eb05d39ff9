/* The life of a block: cut from a request, summed, moved, checked, and over. The I/O thread alone calls these. */
#ifndef ZINF_BLOCKS_H
#define ZINF_BLOCKS_H

#include "state.h"

/* The i-th slot, oldest block first. */
struct slot *zinf_slot(zinf_engine *engine, unsigned i);

/* Cuts blocks from the queue's head into free slots, as many as may be under way and a few in advance, for their
 * checksums. Whether the queue changed. */
bool zinf_cut_blocks(zinf_engine *engine);

/* The block is with the operating system: it counts against the limits until it is settled or over. */
void zinf_take_off(zinf_engine *engine, struct slot *slot);

/* What the block's result means: whole, short, to be retried, or failed. */
void zinf_settle(zinf_engine *engine, struct slot *slot);

/* The block is over: with all its bytes, or with an error. */
void zinf_end_block(zinf_engine *engine, struct slot *slot, int error);

/* Some of the checksums that are due: one large block, or several small ones. Whether there were any. */
bool zinf_work_on_checksums(zinf_engine *engine);

#endif

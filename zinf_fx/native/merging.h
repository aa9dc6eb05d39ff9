/* [Note: merging]  Small blocks that lie side by side in a file go there in one transfer, wherever in memory they are: a
 * model has many small tensors, and they are stored together. The first block of a transfer stands for it at the
 * provider. When it completes, every block gets its own share of the result. A block that a short transfer didn't reach,
 * or that a failed one may have been innocent of, is tried again alone, so that any error is its own. EIO is everybody's:
 * it poisons the file.
 */
#ifndef ZINF_MERGING_H
#define ZINF_MERGING_H

#include "state.h"

/* The result of a block that is to be tried again alone. */
#define ZINF_NOT_TRIED INT64_MIN

/* Makes `first` a transfer of its own, that others may join. */
void zinf_begin_transfer(struct slot *first);

/* Lets `slot` join the transfer from `first` to `last`. Whether it fits there. */
bool zinf_join_transfer(struct slot *first, struct slot *last, struct slot *slot);

/* Gives each block of a completed transfer its result. */
void zinf_share_result(struct slot *first);

#endif

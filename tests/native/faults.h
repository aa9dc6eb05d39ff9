/* Faults that tests inject into engines, by providers that stand between an engine and its own one. */
#ifndef ZINF_FAULTS_H
#define ZINF_FAULTS_H

#include "engine.h"

/* cdef begin: injecting.py hands the lines between these marks to cffi */

#define ZINF_ANY 2

#define ZINF_SUBMISSION 0
#define ZINF_COMPLETION 1

/* It hits blocks nth .. nth+count-1 (from 1, counted from the injection on) of `operation` (or ZINF_ANY) at `stage`:
 *   ZINF_SUBMISSION: error != 0: the submission fails with it; length > 0: only that many bytes are submitted, so that
 *                    the transfer comes back short; delay_ns > 0: it is submitted that much later; all 0: the batch is
 *                    cut before the block, or behind one that is the first (partial submission).
 *   ZINF_COMPLETION: error != 0: the completion reports it; length > 0: it reports at most that many bytes;
 *                    delay_ns > 0: it is seen that much later.
 * A transfer of several blocks is hit where one of them is: it comes back short behind `length` bytes of that block, is
 * late as a whole, and fails as a whole. Unless the error is EIO, which is every block's, none of the blocks has then
 * been counted: the engine tries them one by one, and one of them meets the fault. */
typedef struct {
    int stage;
    int operation;
    int64_t nth;
    int64_t count;
    int error;
    uint64_t length;
    int64_t delay_ns;
} zinf_fault;

/* From now on engines are opened on providers that can fail. */
void zinf_faults_install(void);

/* Arms a fault, -ENOSPC when 16 are armed; NULL disarms every one. -EINVAL: nonsense, or an engine without faults. */
int zinf_faults_inject(zinf_engine *engine, const zinf_fault *fault);

/* How many hit something since the engine was opened. */
uint64_t zinf_faults_fired(zinf_engine *engine);

/* Lets the nth set-up call (from 1) of the engines opened from now on fail with `error`; nth 0: none. An engine makes one
 * before its own provider is open, and one after. The number of set-up calls since this was last called. */
int64_t zinf_faults_set_up(int64_t nth, int error);

/* cdef end */

#endif

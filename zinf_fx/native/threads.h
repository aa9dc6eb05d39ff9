/* Work on many values, divided among threads that stay for the next.
 *
 * Shares are smaller than what one thread does of them, so that a thread whose processor has something else to do holds
 * nobody up. Several callers may divide work at the same time. After a fork, the child starts threads of its own.
 */
#ifndef ZINF_THREADS_H
#define ZINF_THREADS_H

#include <stddef.h>

/* Does the units [first, behind) of some work. */
typedef void zinf_share(void *work, size_t first, size_t behind);

/* Does `units` units of work, which have `values` values together, on at most `threads` threads, of which the caller is
 * one: on fewer where there is little to do, or where the system has no more. All flush subnormal numbers to zero as
 * the caller does. Returns when all is done. */
void zinf_divide(zinf_share *share, void *work, size_t units, size_t values, unsigned threads);

#endif

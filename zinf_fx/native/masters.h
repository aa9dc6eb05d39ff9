/* fp32 masters of bf16 weights, and the 17 bits of each that its weight doesn't have.
 *
 * A weight is its master rounded to nearest and to even, so that the upper half of the master's bits is the weight's
 * bits, or one less where it was rounded away from zero. Kept are the lower 16 bits, and a bit that says whether it was,
 * eight in a byte, the first the lowest. Bits of the last byte behind the last element are 0.
 */
#ifndef ZINF_MASTERS_H
#define ZINF_MASTERS_H

#include <stddef.h>
#include <stdint.h>

/* cdef begin: build.py hands the lines between these marks to cffi */

/* Keep what the weights don't have of their masters. `threads` share the elements at most: see threads.h. */
void zinf_split_masters(const float *masters, const uint16_t *weights, size_t count, uint16_t *lower, uint8_t *up,
                        unsigned threads);

/* The other way. Where the three don't come from one master, as of a weight that was written since, and of NaN, the
 * master is the weight. */
void zinf_join_masters(const uint16_t *weights, const uint16_t *lower, const uint8_t *up, size_t count, float *masters,
                       unsigned threads);

/* cdef end */

/* The bits of one master. `raised`: the bit that is kept. */
static inline uint32_t bits_of_master(uint32_t weight, uint32_t raised, uint32_t lower)
{
    const uint32_t bits = (weight - raised) << 16 | lower, rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return rounded == weight && (bits & 0x7fffffff) <= 0x7f800000 ? bits : weight << 16;
}

#endif

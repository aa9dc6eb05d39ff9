/* Codes of few bits become values, and values codes.
 *
 * Rows of codes, `codes_stride` bytes from one to the next, and of scales, one per block of `block` values,
 * `scales_stride` bytes from one to the next. A value is what its code stands for times the scale of its block, in fp32,
 * rounded once to the dtype that is asked for, to nearest and to even. `threads` share the work at most: see threads.h.
 */
#ifndef ZINF_CODES_H
#define ZINF_CODES_H

#include <stddef.h>
#include <stdint.h>

/* cdef begin: build.py hands the lines between these marks to cffi */

#define ZINF_FP32 0
#define ZINF_BF16 1

/* What codes stand for: signed integers of 8 bits; numbers of 8 bits, E4M3 without infinities; places in a table of 16,
 * two in a byte, the first in its high half, where `block` is even; or places of 8 bits in a table of 256. */
#define ZINF_INTEGERS 0
#define ZINF_E4M3 1
#define ZINF_PAIRS 2
#define ZINF_PLACES 3

/* What a scale is: fp32; or E8M0, the exponent of a power of two in a byte, with a bias of 127, where 255 is NaN. */
#define ZINF_SCALES_FP32 0
#define ZINF_SCALES_E8M0 1

/* values: [rows, columns], contiguous. */
void zinf_dequantize(int kind, const uint8_t *codes, size_t codes_stride, int scale_kind, const uint8_t *scales,
                     size_t scales_stride, size_t rows, size_t columns, size_t block, const float *table, int dtype,
                     void *values, unsigned threads);

/* The other way for 4 bits: of each of 2 * `pairs` values, how many of 15 bounds lie below it, two in a byte. */
void zinf_quantize_4(const float *values, size_t pairs, const float *bounds, uint8_t *codes, unsigned threads);

/* The other way for 8 bits: the scale of a block is its largest magnitude, and the code of a value, divided by that, says
 * how many of 255 bounds, which ascend and end with an infinite one, lie below it. `first`: for the upper 16 bits of any
 * fp32 value, how many bounds lie below all values with these; at most one lies among them. NaN and infinite values
 * make a block's scale NaN. */
void zinf_quantize_8(const float *values, size_t count, size_t block, const float *bounds, const uint8_t *first,
                     uint8_t *codes, float *scales, unsigned threads);

/* cdef end */

#endif

/* Codes of few bits become values, and values codes.
 *
 * Rows of `row_nbytes` bytes each: codes, from byte 0 on, and from byte `codes_nbytes` on one fp32 scale per block of
 * `block` values. A value is its code's entry of a table, times the scale of its block, rounded once to the dtype that is
 * asked for, to nearest and to even.
 */
#ifndef ZINF_CODES_H
#define ZINF_CODES_H

#include <stddef.h>
#include <stdint.h>

/* cdef begin: build.py hands the lines between these marks to cffi */

#define ZINF_FP32 0
#define ZINF_BF16 1

/* Codes of 8 bits: a table of 256 entries; or of 4, two in a byte: one of 256 pairs of entries, and an even `block`.
 * values: [rows, columns], contiguous. */
void zinf_dequantize(int bits, const uint8_t *packed, size_t rows, size_t columns, size_t row_nbytes,
                     size_t codes_nbytes, size_t block, const float *table, int dtype, void *values);

/* The other way for 4 bits: of each of 2 * `pairs` values, how many of 15 bounds lie below it, two in a byte. */
void zinf_quantize_4(const float *values, size_t pairs, const float *bounds, uint8_t *codes);

/* cdef end */

#endif

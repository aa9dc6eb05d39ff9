/* CRC-32C (Castagnoli), one per page: by the processor's instruction where it has one, else by tables.
 *
 * A page's checksum is seeded with its place in the file and the generation of what it belongs to, so that it fits no
 * other page and no other life of the same page. One per 4096 bytes, because any transfer is a multiple of that: what
 * part of a tensor is written never decides what can be verified.
 */
#ifndef ZINF_CHECKSUM_H
#define ZINF_CHECKSUM_H

#include "folding.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* cdef begin */

/* Continues `crc` (0 at the start) over the data. The second never uses the processor's instruction. */
uint32_t zinf_crc32c(uint32_t crc, const void *data, size_t length);
uint32_t zinf_crc32c_by_table(uint32_t crc, const void *data, size_t length);

/* 1 if the processor has the instruction. */
int zinf_crc32c_in_hardware(void);

/* The checksums of `length` bytes (a multiple of 4096) that lie at `offset` of a file. None of them is 0. */
void zinf_page_sums(const void *data, size_t length, int64_t offset, uint64_t generation, uint32_t *sums);

/* Continues the plain checksum `crc` over consecutive pages, from the checksums that they have at `offset` of a file,
 * without the data. -ENODATA where a page's doesn't say: it was never written, or may be a 0 that was replaced. */
int zinf_joined_sums(const uint32_t *sums, size_t pages, int64_t offset, uint64_t generation, uint32_t *crc);

/* cdef end */

/* Bytes before the first page that doesn't have its checksum; `length` if all do. A checksum of 0 fits any page. */
size_t zinf_pages_intact(const void *data, size_t length, int64_t offset, uint64_t generation, const uint32_t *sums);

#endif

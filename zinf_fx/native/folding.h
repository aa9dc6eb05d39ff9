/* CRC-32C by carry-less multiplication, 64 bytes at a time (Gopal et al., "Fast CRC Computation for Generic Polynomials
 * Using PCLMULQDQ Instruction", Intel 2009): about as fast as memory is read. */
#ifndef ZINF_FOLDING_H
#define ZINF_FOLDING_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* cdef begin */

#define ZINF_PAGE 4096

/* cdef end */

/* Whether the processor can, without which there is no `zinf_fold_pages`. To be called before it, once. */
bool zinf_prepare_folding(void);

/* Continues `crcs[k]` over page k of `pages` consecutive ones. */
void zinf_fold_pages(const char *data, size_t pages, uint32_t *crcs);

#endif

/* CRC-32C by carry-less multiplication, 64 bytes at a time (Gopal et al., "Fast CRC Computation for Generic Polynomials
 * Using PCLMULQDQ Instruction", Intel 2009): about as fast as memory is read. */
#ifndef ZINF_FOLDING_H
#define ZINF_FOLDING_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Whether the processor can. To be called before `zinf_fold_pages`, once. */
bool zinf_prepare_folding(void);

/* Continues `crcs[k]` over page k of `pages` consecutive ones. */
void zinf_fold_pages(const char *data, size_t pages, uint32_t *crcs);

#endif

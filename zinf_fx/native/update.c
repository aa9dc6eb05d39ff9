#include "update.h"

#include <math.h>
#include <string.h>

#include "codes.h"
#include "masters.h"
#include "processors.h"
#include "threads.h"

/* The arithmetic is written once, in update_block.h, and compiled for each set of instructions, of which a header has
 * the vectors and what is done with them. Products that are added are rounded first, unless the code says `fma`. */
#pragma GCC push_options
#pragma GCC optimize("O3", "no-math-errno", "fp-contract=off")

/* PyTorch's kernel does by vectors of so many elements or more what it can, and the others one by one. */
#define VECTOR 8

/* Elements from those that are computed with to those that are prefetched. */
#define AHEAD 1024

#define NAMED(name) name##_plain
#include "update_plain.h"
#include "update_block.h"
#undef NAMED

#ifdef HAS_PROCESSORS
#pragma GCC push_options
#pragma GCC target("arch=x86-64-v3")
#define NAMED(name) name##_avx2
#include "update_avx2.h"
#include "update_block.h"
#undef NAMED
#pragma GCC pop_options

#pragma GCC push_options
#pragma GCC target("arch=x86-64-v4")
#define NAMED(name) name##_avx512
#include "update_avx512.h"
#include "update_block.h"
#undef NAMED
#pragma GCC pop_options
#endif

#pragma GCC pop_options

typedef void update(const struct zinf_options *options, const struct zinf_operands *operands, size_t first,
                    size_t count);

#ifdef HAS_PROCESSORS
static update *const of_instructions[] = {update_plain, update_avx2, update_avx512};

int zinf_instructions(void)
{
    if (__builtin_cpu_supports("x86-64-v4"))
        return ZINF_AVX512;
    return __builtin_cpu_supports("x86-64-v3") ? ZINF_AVX2 : ZINF_PLAIN;
}
#else
static update *const of_instructions[] = {update_plain, update_plain, update_plain};

int zinf_instructions(void) { return ZINF_PLAIN; }
#endif

struct updates {
    const struct zinf_options *options;
    const struct zinf_operands *operands;
    update *blocks; /* for whole blocks */
};

static size_t blocks_of(const struct zinf_operands *operands)
{
    return (operands->count + ZINF_BLOCK - 1) / ZINF_BLOCK;
}

/* Units are blocks, those of all operands in turn. */
static void update_share(void *work, size_t first, size_t behind)
{
    const struct updates all = *(struct updates *)work;
    const struct zinf_operands *operands = all.operands;
    for (size_t before = 0; before < behind; before += blocks_of(operands++)) {
        size_t here = blocks_of(operands), end = behind - before < here ? behind - before : here;
        size_t start = (first > before ? first - before : 0) * ZINF_BLOCK, stop = end * ZINF_BLOCK;
        if (start >= stop)
            continue;
        const size_t left = stop > operands->count ? operands->count % ZINF_BLOCK : 0; /* no whole vectors */
        if (stop - start > (left ? ZINF_BLOCK : 0))
            all.blocks(all.options, operands, start, stop - start - (left ? ZINF_BLOCK : 0));
        if (left)
            update_plain(all.options, operands, operands->count - left, left);
    }
}

void zinf_update(const struct zinf_options *options, const struct zinf_operands *operands, size_t number,
                 int instructions, unsigned threads)
{
    struct updates all = {options, operands, of_instructions[instructions]};
    size_t units = 0, values = 0;
    for (size_t i = 0; i < number; i++)
        units += blocks_of(&operands[i]), values += operands[i].count;
    zinf_divide(update_share, &all, units, values, threads);
}

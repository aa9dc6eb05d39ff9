/* One step of Adam, AdamW or SGD over elements that are kept in few bits, in one pass over memory.
 *
 * Arithmetic is in fp32, and each operation is that of PyTorch's fused kernel for fp32 on the CPU, in its order. What is
 * kept is decoded, updated and encoded block by block, in the first cache. The result is the same to the bit for every
 * set of instructions and any number of threads.
 */
#ifndef ZINF_UPDATE_H
#define ZINF_UPDATE_H

#include <stddef.h>
#include <stdint.h>

/* cdef begin: build.py hands the lines between these marks to cffi */

/* How elements are kept, besides ZINF_FP32 and ZINF_BF16: fp16; codes of 8 bits, with a scale of each block as the
 * companion; the lower halves of fp32 masters of bf16 weights, with their bits (see masters.h) as the companion. */
#define ZINF_FP16 2
#define ZINF_CODES 3
#define ZINF_SPLIT 4

/* Elements of a block of codes. */
#define ZINF_BLOCK 256

/* Rules, and the most states that one has. */
#define ZINF_ADAM 0
#define ZINF_SGD 1
#define ZINF_STATES 3

/* Instructions. */
#define ZINF_PLAIN 0
#define ZINF_AVX2 1
#define ZINF_AVX512 2

/* What codes of 8 bits stand for, and which code a value has, divided by the scale: for the upper 16 bits of any fp32
 * value, the least code times 65536, and what the lower 16 bits, inverted where the value is negative, carry into the
 * next code when it is added to them. */
struct zinf_map {
    const float *values;    /* [256] */
    const uint32_t *places; /* [65536] */
};

struct zinf_kept {
    int kind;
    int is_new; /* holds nothing yet, and is taken for zeros */
    void *values;
    void *companion;
    const struct zinf_map *map;
};

/* Elements of one parameter, `count` in each array, that begin at a multiple of ZINF_BLOCK. */
struct zinf_operands {
    size_t count;
    struct zinf_kept gradient; /* in fp32, bf16 or fp16 */
    struct zinf_kept master;   /* in fp32 or split */
    struct zinf_kept weight;   /* in bf16 or fp16: the master, rounded; or its values are NULL, and there is none */
    struct zinf_kept states[ZINF_STATES]; /* exp_avg, exp_avg_sq, and max_exp_avg_sq with amsgrad; or momentum_buffer */
    float step_size;                      /* less than 0: -lr, which Adam divides by 1 - beta1 ** step */
    float root;                           /* of Adam: sqrt(1 - beta2 ** step) */
};

struct zinf_options {
    int rule;           /* ZINF_ADAM or ZINF_SGD */
    float direction;    /* 1; -1 to maximize */
    float weight_decay; /* of Adam and SGD, which add it to the gradient; or 0 */
    float shrinking;    /* of AdamW: 1 - lr * weight_decay; or 1 */
    float exp_avg_rate; /* 1 - beta1 */
    float beta2;
    float exp_avg_sq_rate; /* 1 - beta2 */
    float eps;
    int amsgrad;
    float momentum;      /* of SGD, which without it has no states */
    float momentum_rate; /* 1 - dampening */
    int nesterov;
    unsigned vector; /* elements of a vector of PyTorch's kernel, whose maximum of NaN and a number is NaN; behind the
                      * last vector, it is what was the maximum before */
};

/* The best instructions that this processor has. */
int zinf_instructions(void);

/* Update `number` operands, on at most `threads` threads: see threads.h. */
void zinf_update(const struct zinf_options *options, const struct zinf_operands *operands, size_t number,
                 int instructions, unsigned threads);

/* cdef end */

#endif

/* Updates of every format by every set of instructions and several threads, for the sanitizers: arrays are as long as
 * what they hold, and the results are the same to the bit. */
#include "codes.h"
#include "update.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OPERANDS = 4, ARRAYS = 10, WAYS = 5, RANDOM = 4099 };

static const size_t counts[OPERANDS] = {1, 255, 256, 1 << 17};
static const int ways[WAYS][2] = {{ZINF_PLAIN, 1}, {ZINF_PLAIN, 3}, {ZINF_AVX2, 1}, {ZINF_AVX512, 1}, {ZINF_AVX512, 3}};

static float numbers[256];
static uint32_t places[65536];
static const struct zinf_map map = {numbers, places};

static size_t itemsize(int kind) { return kind == ZINF_FP32 ? 4 : kind == ZINF_CODES ? 1 : 2; }

/* Elements that arrays begin with, each somewhere else; none is negative. */
static float random_values[RANDOM];
static uint16_t random_halves[RANDOM];
static size_t drawn;

/* An array of its own of random elements of a kind, of which `nbytes` are to be compared. */
static void *array(size_t count, int kind, size_t *nbytes)
{
    *nbytes = count * itemsize(kind);
    uint8_t *made = malloc(*nbytes);
    drawn += 101;
    for (size_t i = 0; i < count; i++) {
        const size_t from = (drawn + i) % RANDOM;
        const void *element = kind == ZINF_FP32 ? (const void *)&random_values[from] : (const void *)&random_halves[from];
        memcpy(made + i * itemsize(kind), element, itemsize(kind));
    }
    return made;
}

static struct zinf_kept kept(size_t count, int kind, uint8_t **arrays, size_t *nbytes)
{
    struct zinf_kept made = {kind, 0, array(count, kind, nbytes), NULL, kind == ZINF_CODES ? &map : NULL};
    arrays[0] = made.values;
    if (kind == ZINF_CODES)
        made.companion = array((count + ZINF_BLOCK - 1) / ZINF_BLOCK, ZINF_FP32, nbytes + 1);
    if (kind == ZINF_SPLIT)
        made.companion = array((count + 7) / 8, ZINF_CODES, nbytes + 1);
    arrays[1] = made.companion;
    return made;
}

/* The sum of all bits after two steps in a format, which is that of any way. */
static uint64_t updated(const struct zinf_options *options, int gradient, int master, int moments, const int *way)
{
    struct zinf_operands operands[OPERANDS];
    uint8_t *arrays[OPERANDS][ARRAYS] = {{NULL}};
    size_t nbytes[OPERANDS][ARRAYS] = {{0}};
    drawn = 0;
    for (int i = 0; i < OPERANDS; i++) {
        struct zinf_operands all = {.count = counts[i], .step_size = -0.01f, .root = 0.5f};
        all.gradient = kept(counts[i], gradient, &arrays[i][0], &nbytes[i][0]);
        all.master = kept(counts[i], master, &arrays[i][1], &nbytes[i][1]);
        if (master == ZINF_SPLIT || gradient != ZINF_FP32)
            all.weight = kept(counts[i], gradient == ZINF_FP16 ? ZINF_FP16 : ZINF_BF16, &arrays[i][3], &nbytes[i][3]);
        for (int k = 0; k < ZINF_STATES; k++)
            all.states[k] = kept(counts[i], moments, &arrays[i][4 + 2 * k], &nbytes[i][4 + 2 * k]);
        operands[i] = all;
    }
    for (int step = 0; step < 2; step++)
        zinf_update(options, operands, OPERANDS, way[0], (unsigned)way[1]);
    uint64_t sum = 0;
    for (int i = 0; i < OPERANDS; i++)
        for (int k = 0; k < ARRAYS; k++) {
            for (size_t byte = 0; byte < nbytes[i][k]; byte++) sum = sum * 1099511628211u + arrays[i][k][byte];
            free(arrays[i][k]);
        }
    return sum;
}

static const struct zinf_options rules[] = {
    {.rule = ZINF_ADAM, .direction = -1, .weight_decay = 0.1f, .shrinking = 1, .exp_avg_rate = 0.1f, .beta2 = 0.99f,
     .exp_avg_sq_rate = 0.01f, .eps = 1e-8f, .amsgrad = 1, .vector = 16},
    {.rule = ZINF_SGD, .direction = 1, .momentum = 0.9f, .momentum_rate = 0.7f, .nesterov = 1, .vector = 1},
};

/* Whether all ways with at least so many threads have the same result. */
static int are_same(const struct zinf_options *options, int gradient, int master, int moments, int threads)
{
    uint64_t first = 0;
    for (int way = 0, done = 0; way < WAYS; way++) {
        if (ways[way][1] < threads || ways[way][0] > zinf_instructions())
            continue;
        const uint64_t sum = updated(options, gradient, master, moments, ways[way]);
        if (done++ == 0)
            first = sum;
        if (sum != first) {
            fprintf(stderr, "rule %d, gradients %d, master %d, moments %d: way %d has another result\n", options->rule,
                    gradient, master, moments, way);
            return 0;
        }
    }
    return 1;
}

/* With the least number of threads as its argument. */
int main(int count, char **arguments)
{
    const int threads = count > 1 ? atoi(arguments[1]) : 1;
    srand(7);
    for (int i = 0; i < RANDOM; i++) {
        random_values[i] = ldexpf((float)(rand() % 1000), rand() % 20 - 20);
        random_halves[i] = (uint16_t)(rand() % 0x7000);
    }
    static const int gradients[] = {ZINF_FP32, ZINF_BF16, ZINF_FP16}, moments[] = {ZINF_FP32, ZINF_BF16, ZINF_CODES};
    for (int code = 0; code < 256; code++) numbers[code] = (float)code / 256;
    for (int upper = 0; upper < 65536; upper++) places[upper] = (uint32_t)(upper / 256) << 16 | 0x1234;
    for (int rule = 0; rule < 2; rule++)
        for (int i = 0; i < 3; i++)
            for (int splits = 0; splits < 2 - (gradients[i] == ZINF_FP16); splits++)
                for (int k = 0; k < 3; k++)
                    if (!are_same(&rules[rule], gradients[i], splits ? ZINF_SPLIT : ZINF_FP32, moments[k], threads))
                        return 1;
    return 0;
}

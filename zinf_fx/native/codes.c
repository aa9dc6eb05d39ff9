#include "codes.h"

#include <string.h>

/* Values that are computed in fp32 before they are rounded: few enough for the first cache. */
#define STRIP 256

/* The compiler makes one version for each of these processors, and the loader takes the best. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define FOR_EACH_PROCESSOR __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default"), optimize("O3")))
#else
#define FOR_EACH_PROCESSOR
#endif

static inline void store(const float *values, size_t count, int dtype, void *target, size_t first) {
    if (dtype == ZINF_FP32) {
        memcpy((float *)target + first, values, count * sizeof(float));
        return;
    }
    uint16_t *rounded = (uint16_t *)target + first;
    for (size_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, &values[i], sizeof bits);
        rounded[i] = (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
    }
}

static inline size_t least(size_t a, size_t b) { return a < b ? a : b; }

FOR_EACH_PROCESSOR
void zinf_dequantize(int bits, const uint8_t *packed, size_t rows, size_t columns, size_t row_nbytes,
                     size_t codes_nbytes, size_t block, const float *table, int dtype, void *values) {
    float strip[STRIP];
    for (size_t row = 0; row < rows; row++) {
        const uint8_t *codes = packed + row * row_nbytes;
        for (size_t start = 0; start < columns; start += block) {
            size_t end = least(start + block, columns);
            float scale;
            memcpy(&scale, codes + codes_nbytes + start / block * sizeof(float), sizeof scale);
            for (size_t first = start; first < end; first += STRIP) {
                size_t count = least(STRIP, end - first);
                if (bits == 8) {
                    for (size_t i = 0; i < count; i++) strip[i] = table[codes[first + i]] * scale;
                } else {
                    /* An odd count ends a row, whose codes are padded to whole blocks, and the strip is even. */
                    for (size_t i = 0; i < (count + 1) / 2; i++)
                        memcpy(&strip[2 * i], &table[2 * codes[first / 2 + i]], 2 * sizeof(float));
                    for (size_t i = 0; i < count; i++) strip[i] *= scale;
                }
                store(strip, count, dtype, values, row * columns + first);
            }
        }
    }
}

FOR_EACH_PROCESSOR
void zinf_quantize_4(const float *values, size_t pairs, const float *bounds, uint8_t *codes) {
    int32_t strip[STRIP];
    for (size_t first = 0; first < 2 * pairs; first += STRIP) {
        size_t count = least(STRIP, 2 * pairs - first);
        memset(strip, 0, sizeof strip);
        for (int bound = 0; bound < 15; bound++)
            for (size_t i = 0; i < count; i++) strip[i] += values[first + i] > bounds[bound];
        for (size_t i = 0; i < count / 2; i++) codes[first / 2 + i] = (uint8_t)(strip[2 * i] << 4 | strip[2 * i + 1]);
    }
}

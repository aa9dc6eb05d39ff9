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
void zinf_dequantize(int bits, const uint8_t *codes, size_t codes_stride, const uint8_t *scales, size_t scales_stride,
                     size_t rows, size_t columns, size_t block, const float *table, int dtype, void *values) {
    float strip[STRIP];
    for (size_t row = 0; row < rows; row++, codes += codes_stride, scales += scales_stride) {
        for (size_t start = 0; start < columns; start += block) {
            size_t end = least(start + block, columns);
            float scale;
            memcpy(&scale, scales + start / block * sizeof(float), sizeof scale);
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

/* The largest magnitude; NaN if any value is not finite. */
static inline float magnitude_of(const float *values, size_t count) {
    uint32_t largest = 0; /* finite magnitudes are ordered as their bits are, and the others lie above */
    for (size_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, &values[i], sizeof bits);
        bits &= 0x7fffffff;
        largest = bits > largest ? bits : largest;
    }
    if (largest >= 0x7f800000) largest = 0x7fc00000;
    float magnitude;
    memcpy(&magnitude, &largest, sizeof magnitude);
    return magnitude;
}

FOR_EACH_PROCESSOR
void zinf_quantize_8(const float *values, size_t count, size_t block, const float *bounds, const uint8_t *first,
                     uint8_t *codes, float *scales) {
    float strip[STRIP];
    for (size_t start = 0; start < count; start += block) {
        size_t end = least(start + block, count);
        float scale = magnitude_of(values + start, end - start);
        float divisor = scale > 0 ? scale : 1;
        scales[start / block] = scale;
        for (size_t begin = start; begin < end; begin += STRIP) {
            size_t some = least(STRIP, end - begin);
            for (size_t i = 0; i < some; i++) strip[i] = values[begin + i] / divisor;
            for (size_t i = 0; i < some; i++) {
                uint32_t bits;
                memcpy(&bits, &strip[i], sizeof bits);
                uint8_t below = first[bits >> 16];
                codes[begin + i] = (uint8_t)(below + (strip[i] > bounds[below]));
            }
        }
    }
}

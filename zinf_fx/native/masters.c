#include "masters.h"

#include <string.h>

#include "processors.h"

/* Elements at a time, few enough for the first cache: a multiple of 8. */
#define STRIP 512

static inline size_t least(size_t a, size_t b) { return a < b ? a : b; }

FOR_EACH_PROCESSOR
void zinf_split_masters(const float *masters, const uint16_t *weights, size_t count, uint16_t *lower, uint8_t *up) {
    uint8_t strip[STRIP];
    for (size_t first = 0; first < count; first += STRIP) {
        size_t some = least(STRIP, count - first);
        memset(strip, 0, sizeof strip);
        for (size_t i = 0; i < some; i++) {
            uint32_t bits;
            memcpy(&bits, &masters[first + i], sizeof bits);
            lower[first + i] = (uint16_t)bits;
            strip[i] = (uint16_t)(bits >> 16) != weights[first + i];
        }
        for (size_t byte = 0; byte < (some + 7) / 8; byte++) {
            uint8_t together = 0;
            for (int bit = 0; bit < 8; bit++) together |= (uint8_t)(strip[8 * byte + bit] << bit);
            up[first / 8 + byte] = together;
        }
    }
}

FOR_EACH_PROCESSOR
void zinf_join_masters(const uint16_t *weights, const uint16_t *lower, const uint8_t *up, size_t count, float *masters) {
    uint32_t strip[STRIP];
    for (size_t first = 0; first < count; first += STRIP) {
        size_t some = least(STRIP, count - first);
        for (size_t byte = 0; byte < (some + 7) / 8; byte++)
            for (int bit = 0; bit < 8; bit++) strip[8 * byte + bit] = (uint32_t)(up[first / 8 + byte] >> bit & 1);
        for (size_t i = 0; i < some; i++) {
            uint32_t weight = weights[first + i];
            uint32_t bits = (weight - strip[i]) << 16 | lower[first + i];
            uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
            int is_of_weight = rounded == weight && (bits & 0x7fffffff) <= 0x7f800000;
            strip[i] = is_of_weight ? bits : weight << 16;
        }
        memcpy(masters + first, strip, some * sizeof *masters);
    }
}

#include "masters.h"

#include <string.h>

#include "processors.h"
#include "threads.h"

/* Elements at a time, few enough for the first cache: a multiple of 8. */
#define STRIP 512

static inline size_t least(size_t a, size_t b) { return a < b ? a : b; }

/* Units of work are bytes of `up`, each with the bits of eight elements. */
static inline size_t bytes_of(size_t count) { return (count + 7) / 8; }

struct split {
    const float *masters;
    const uint16_t *weights;
    size_t count;
    uint16_t *lower;
    uint8_t *up;
};

FOR_EACH_PROCESSOR
static void split_masters(void *work, size_t first_byte, size_t behind) {
    const struct split all = *(struct split *)work;
    const float *masters = all.masters;
    const uint16_t *weights = all.weights;
    uint16_t *lower = all.lower;
    uint8_t *up = all.up, strip[STRIP];
    size_t end = least(8 * behind, all.count);
    for (size_t first = 8 * first_byte; first < end; first += STRIP) {
        size_t some = least(STRIP, end - first);
        memset(strip, 0, sizeof strip);
        for (size_t i = 0; i < some; i++) {
            uint32_t bits;
            memcpy(&bits, &masters[first + i], sizeof bits);
            lower[first + i] = (uint16_t)bits;
            strip[i] = (uint16_t)(bits >> 16) != weights[first + i];
        }
        for (size_t byte = 0; byte < bytes_of(some); byte++) {
            uint8_t together = 0;
            for (int bit = 0; bit < 8; bit++) together |= (uint8_t)(strip[8 * byte + bit] << bit);
            up[first / 8 + byte] = together;
        }
    }
}

void zinf_split_masters(const float *masters, const uint16_t *weights, size_t count, uint16_t *lower, uint8_t *up,
                        unsigned threads) {
    struct split all = {masters, weights, count, lower, up};
    zinf_divide(split_masters, &all, bytes_of(count), count, threads);
}

struct join {
    const uint16_t *weights, *lower;
    const uint8_t *up;
    size_t count;
    float *masters;
};

FOR_EACH_PROCESSOR
static void join_masters(void *work, size_t first_byte, size_t behind) {
    const struct join all = *(struct join *)work;
    const uint16_t *weights = all.weights, *lower = all.lower;
    const uint8_t *up = all.up;
    float *masters = all.masters;
    uint32_t strip[STRIP];
    size_t end = least(8 * behind, all.count);
    for (size_t first = 8 * first_byte; first < end; first += STRIP) {
        size_t some = least(STRIP, end - first);
        for (size_t byte = 0; byte < bytes_of(some); byte++)
            for (int bit = 0; bit < 8; bit++) strip[8 * byte + bit] = (uint32_t)(up[first / 8 + byte] >> bit & 1);
        for (size_t i = 0; i < some; i++)
            strip[i] = bits_of_master(weights[first + i], strip[i], lower[first + i]);
        memcpy(masters + first, strip, some * sizeof *masters);
    }
}

void zinf_join_masters(const uint16_t *weights, const uint16_t *lower, const uint8_t *up, size_t count, float *masters,
                       unsigned threads) {
    struct join all = {weights, lower, up, count, masters};
    zinf_divide(join_masters, &all, bytes_of(count), count, threads);
}

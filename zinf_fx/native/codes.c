#include "codes.h"

#include <string.h>

#include "processors.h"
#include "threads.h"

/* Values that are computed in fp32 before they are rounded: few enough for the first cache. */
#define STRIP 256

static inline uint16_t bf16_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static inline void store(const float *values, size_t count, int dtype, void *target, size_t first) {
    if (dtype == ZINF_FP32) {
        memcpy((float *)target + first, values, count * sizeof(float));
        return;
    }
    uint16_t *rounded = (uint16_t *)target + first;
    for (size_t i = 0; i < count; i++) rounded[i] = bf16_of(values[i]);
}

static inline size_t least(size_t a, size_t b) { return a < b ? a : b; }

static inline float scale_at(int scale_kind, const uint8_t *scales, size_t block) {
    uint32_t bits;
    if (scale_kind == ZINF_SCALES_FP32) {
        memcpy(&bits, scales + block * sizeof bits, sizeof bits);
    } else {
        const uint32_t exponent = scales[block];
        bits = exponent == 255 ? 0x7fc00000 : exponent ? exponent << 23 : 0x00400000; /* 2^-127 is subnormal */
    }
    float scale;
    memcpy(&scale, &bits, sizeof scale);
    return scale;
}

/* 1 bit of sign, 4 of exponent with a bias of 7, 3 of mantissa; the largest magnitude is NaN. */
static inline float of_e4m3(uint8_t code) {
    const uint32_t magnitude = code & 127, sign = (uint32_t)(code & 128) << 24;
    const int is_subnormal = magnitude < 8;
    uint32_t bits = magnitude == 127 ? 0x7fc00000 : (magnitude << 20) + ((is_subnormal ? 121u : 120u) << 23);
    float value;
    memcpy(&value, &bits, sizeof value);
    value -= is_subnormal ? 0x1p-6f : 0.0f;
    memcpy(&bits, &value, sizeof bits);
    bits |= sign;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* A row [columns] of codes of 8 bits. */
static inline __attribute__((always_inline)) void
row_of_8(int kind, const uint8_t *codes, int scale_kind, const uint8_t *scales, size_t columns, size_t block,
         const float *table, int dtype, void *values, size_t position) {
    float strip[STRIP];
    for (size_t start = 0; start < columns; start += block) {
        const size_t end = least(start + block, columns);
        const float scale = scale_at(scale_kind, scales, start / block);
        for (size_t first = start; first < end; first += STRIP) {
            const size_t count = least(STRIP, end - first);
            if (kind == ZINF_INTEGERS)
                for (size_t i = 0; i < count; i++) strip[i] = (float)(int8_t)codes[first + i] * scale;
            else if (kind == ZINF_E4M3)
                for (size_t i = 0; i < count; i++) strip[i] = of_e4m3(codes[first + i]) * scale;
            else
                for (size_t i = 0; i < count; i++) strip[i] = table[codes[first + i]] * scale;
            store(strip, count, dtype, values, position + first);
        }
    }
}


/* Codes of 4 bits to bf16: a block's 16 possible values are rounded once, and then only looked up. */

typedef void look_up(const uint8_t *codes, size_t nbytes, const uint16_t *of_code, uint16_t *values);

static void look_up_each(const uint8_t *codes, size_t nbytes, const uint16_t *of_code, uint16_t *values) {
    for (size_t i = 0; i < nbytes; i++) {
        values[2 * i] = of_code[codes[i] >> 4];
        values[2 * i + 1] = of_code[codes[i] & 15];
    }
}

#ifdef HAS_PROCESSORS
/* 32 bytes at a time: both bytes of the values are looked up, and put side by side. */
FOR_PROCESSOR("x86-64-v3")
static void look_up_64(const uint8_t *codes, size_t nbytes, const uint16_t *of_code, uint16_t *values) {
    const __m256i all = _mm256_loadu_si256((const __m256i *)of_code), fifteen = _mm256_set1_epi8(15);
    __m256i low = _mm256_packus_epi16(_mm256_and_si256(all, _mm256_set1_epi16(0xff)), _mm256_setzero_si256());
    __m256i high = _mm256_packus_epi16(_mm256_srli_epi16(all, 8), _mm256_setzero_si256());
    low = _mm256_permute4x64_epi64(low, 0x88), high = _mm256_permute4x64_epi64(high, 0x88);
    size_t done = 0;
    for (; done + 32 <= nbytes; done += 32) {
        const __m256i these = _mm256_loadu_si256((const __m256i *)(codes + done));
        const __m256i first = _mm256_and_si256(_mm256_srli_epi16(these, 4), fifteen);
        const __m256i second = _mm256_and_si256(these, fifteen);
        const __m256i a_low = _mm256_shuffle_epi8(low, first), a_high = _mm256_shuffle_epi8(high, first);
        const __m256i b_low = _mm256_shuffle_epi8(low, second), b_high = _mm256_shuffle_epi8(high, second);
        const __m256i a = _mm256_unpacklo_epi8(a_low, a_high), b = _mm256_unpacklo_epi8(b_low, b_high);
        const __m256i c = _mm256_unpackhi_epi8(a_low, a_high), d = _mm256_unpackhi_epi8(b_low, b_high);
        const __m256i e = _mm256_unpacklo_epi16(a, b), f = _mm256_unpackhi_epi16(a, b);
        const __m256i g = _mm256_unpacklo_epi16(c, d), h = _mm256_unpackhi_epi16(c, d);
        __m256i *target = (__m256i *)(values + 2 * done);
        _mm256_storeu_si256(target, _mm256_permute2x128_si256(e, f, 0x20));
        _mm256_storeu_si256(target + 1, _mm256_permute2x128_si256(g, h, 0x20));
        _mm256_storeu_si256(target + 2, _mm256_permute2x128_si256(e, f, 0x31));
        _mm256_storeu_si256(target + 3, _mm256_permute2x128_si256(g, h, 0x31));
    }
    look_up_each(codes + done, nbytes - done, of_code, values + 2 * done);
}

/* 16 bytes at a time, whose codes one instruction looks up: it takes 5 bits, of which the highest doesn't matter. */
FOR_PROCESSOR("x86-64-v4")
static void look_up_32(const uint8_t *codes, size_t nbytes, const uint16_t *of_code, uint16_t *values) {
    const __m512i twice = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)of_code));
    size_t done = 0;
    for (; done + 16 <= nbytes; done += 16) {
        const __m512i pairs = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(codes + done)));
        const __m512i each = _mm512_or_si512(_mm512_slli_epi32(pairs, 16), _mm512_srli_epi32(pairs, 4));
        _mm512_storeu_si512(values + 2 * done, _mm512_permutexvar_epi16(each, twice));
    }
    look_up_each(codes + done, nbytes - done, of_code, values + 2 * done);
}
#endif

/* A row [columns] to bf16. */
#define ROW_OF_4                                                                                                       \
    (const uint8_t *codes, int scale_kind, const uint8_t *scales, size_t columns, size_t block, const float *table,    \
     uint16_t *values)

static inline __attribute__((always_inline)) void
row_with(look_up *look_up, const uint8_t *codes, int scale_kind, const uint8_t *scales, size_t columns, size_t block,
         const float *table, uint16_t *values) {
    for (size_t start = 0; start < columns; start += block) {
        const size_t count = least(block, columns - start);
        const float scale = scale_at(scale_kind, scales, start / block);
        uint16_t of_code[16];
        for (int code = 0; code < 16; code++) of_code[code] = bf16_of(table[code] * scale);
        look_up(codes + start / 2, count / 2, of_code, values + start);
        if (count % 2) values[start + count - 1] = of_code[codes[(start + count) / 2] >> 4];
    }
}

typedef void row_of_4 ROW_OF_4;

static void row_plain ROW_OF_4 { row_with(look_up_each, codes, scale_kind, scales, columns, block, table, values); }

#ifdef HAS_PROCESSORS
FOR_PROCESSOR("x86-64-v3")
static void row_v3 ROW_OF_4 { row_with(look_up_64, codes, scale_kind, scales, columns, block, table, values); }

FOR_PROCESSOR("x86-64-v4")
static void row_v4 ROW_OF_4 { row_with(look_up_32, codes, scale_kind, scales, columns, block, table, values); }

static row_of_4 *best_row(void) {
    if (__builtin_cpu_supports("x86-64-v4")) return row_v4;
    return __builtin_cpu_supports("x86-64-v3") ? row_v3 : row_plain;
}
#else
static row_of_4 *best_row(void) { return row_plain; }
#endif

/* As a row of 4 bits, to fp32. */
static void row_in_fp32(const uint8_t *codes, int scale_kind, const uint8_t *scales, size_t columns, size_t block,
                        const float *table, float *values) {
    for (size_t start = 0; start < columns; start += block) {
        const size_t count = least(block, columns - start);
        const float scale = scale_at(scale_kind, scales, start / block);
        float of_code[16];
        for (int code = 0; code < 16; code++) of_code[code] = table[code] * scale;
        for (size_t i = start; i < start + count; i++)
            values[i] = of_code[i % 2 ? codes[i / 2] & 15 : codes[i / 2] >> 4];
    }
}

struct rows {
    int kind;
    const uint8_t *codes;
    size_t codes_stride;
    int scale_kind;
    const uint8_t *scales;
    size_t scales_stride, columns, block;
    const float *table;
    int dtype;
    void *values;
};

FOR_EACH_PROCESSOR
static void dequantize_rows(void *work, size_t first, size_t behind) {
    const struct rows all = *(struct rows *)work;
    const size_t columns = all.columns;
    row_of_4 *const row_in_bf16 = best_row();
    for (size_t row = first; row < behind; row++) {
        const uint8_t *codes = all.codes + row * all.codes_stride, *scales = all.scales + row * all.scales_stride;
        if (all.kind != ZINF_PAIRS)
            row_of_8(all.kind, codes, all.scale_kind, scales, columns, all.block, all.table, all.dtype, all.values,
                     row * columns);
        else if (all.dtype == ZINF_BF16)
            row_in_bf16(codes, all.scale_kind, scales, columns, all.block, all.table,
                        (uint16_t *)all.values + row * columns);
        else
            row_in_fp32(codes, all.scale_kind, scales, columns, all.block, all.table,
                        (float *)all.values + row * columns);
    }
}

void zinf_dequantize(int kind, const uint8_t *codes, size_t codes_stride, int scale_kind, const uint8_t *scales,
                     size_t scales_stride, size_t rows, size_t columns, size_t block, const float *table, int dtype,
                     void *values, unsigned threads) {
    struct rows all = {kind,    codes, codes_stride, scale_kind, scales, scales_stride,
                       columns, block, table,        dtype,      values};
    zinf_divide(dequantize_rows, &all, rows, rows * columns, threads);
}

struct pairs {
    const float *values, *bounds;
    uint8_t *codes;
};

FOR_EACH_PROCESSOR
static void quantize_pairs(void *work, size_t first_pair, size_t behind) {
    const struct pairs all = *(struct pairs *)work;
    const float *values = all.values, *bounds = all.bounds;
    uint8_t *codes = all.codes;
    int32_t strip[STRIP];
    for (size_t first = 2 * first_pair; first < 2 * behind; first += STRIP) {
        size_t count = least(STRIP, 2 * behind - first);
        memset(strip, 0, sizeof strip);
        for (int bound = 0; bound < 15; bound++)
            for (size_t i = 0; i < count; i++) strip[i] += values[first + i] > bounds[bound];
        for (size_t i = 0; i < count / 2; i++) codes[first / 2 + i] = (uint8_t)(strip[2 * i] << 4 | strip[2 * i + 1]);
    }
}

void zinf_quantize_4(const float *values, size_t pairs, const float *bounds, uint8_t *codes, unsigned threads) {
    struct pairs all = {values, bounds, codes};
    zinf_divide(quantize_pairs, &all, pairs, 2 * pairs, threads);
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

struct blocks {
    const float *values;
    size_t count, block;
    const float *bounds;
    const uint8_t *first;
    uint8_t *codes;
    float *scales;
};

FOR_EACH_PROCESSOR
static void quantize_blocks(void *work, size_t first_block, size_t behind) {
    const struct blocks all = *(struct blocks *)work;
    const float *values = all.values, *bounds = all.bounds;
    const uint8_t *first = all.first;
    uint8_t *codes = all.codes;
    float strip[STRIP];
    for (size_t number = first_block; number < behind; number++) {
        size_t start = number * all.block, end = least(start + all.block, all.count);
        float scale = magnitude_of(values + start, end - start);
        float divisor = scale > 0 ? scale : 1;
        all.scales[number] = scale;
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

void zinf_quantize_8(const float *values, size_t count, size_t block, const float *bounds, const uint8_t *first,
                     uint8_t *codes, float *scales, unsigned threads) {
    struct blocks all = {values, count, block, bounds, first, codes, scales};
    zinf_divide(quantize_blocks, &all, (count + block - 1) / block, count, threads);
}

#include "folding.h"

#if defined(__x86_64__)

#include <immintrin.h>

enum {
    VECTOR = 64,  /* bytes */
    STREAMS = 4,  /* vectors that are folded independently, to hide the multiplication's latency */
    CACHE_LINE = 64,
    AHEAD = 4096, /* bytes: the processor prefetches within a page only */
};

static struct {
    uint64_t streams[8], vector[8], lanes[8];
} by;

/* x^n modulo the polynomial, bits reflected. */
static uint64_t power(unsigned n)
{
    uint32_t value = 1u << 31;
    while (n--)
        value = value >> 1 ^ (value & 1 ? 0x82f63b78 : 0);
    return value;
}

/* What moves 16 bytes by so many bytes: for their first half, which is the higher powers of x, and for their second. */
static void move_by(unsigned bytes, uint64_t factors[2])
{
    factors[0] = power(8 * bytes + 31);
    factors[1] = power(8 * bytes - 33);
}

bool zinf_prepare_folding(void)
{
    for (int lane = 0; lane < 4; lane++) {
        move_by(STREAMS * VECTOR, by.streams + 2 * lane);
        move_by(VECTOR, by.vector + 2 * lane);
        if (lane < 3)
            move_by(VECTOR - 16 * (unsigned)(lane + 1), by.lanes + 2 * lane);
    }
    __builtin_cpu_init();
    return __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("avx512f") &&
           __builtin_cpu_supports("vpclmulqdq");
}

#define FOLDING __attribute__((target("sse4.2,avx512f,vpclmulqdq")))

FOLDING static inline __m512i fold(__m512i value, __m512i factors, __m512i next)
{
    __m512i first = _mm512_clmulepi64_epi128(value, factors, 0x00);
    __m512i second = _mm512_clmulepi64_epi128(value, factors, 0x11);
    return _mm512_ternarylogic_epi64(first, second, next, 0x96); /* the exclusive or of the three */
}

/* The remainder of what is left, by the instruction that takes one word after the other. */
FOLDING static inline uint32_t reduce(__m512i value)
{
    __m512i moved = fold(value, _mm512_loadu_si512(by.lanes), _mm512_setzero_si512());
    __m128i sum = _mm512_extracti32x4_epi32(value, 3);
    sum = _mm_xor_si128(sum, _mm512_castsi512_si128(moved));
    sum = _mm_xor_si128(sum, _mm512_extracti32x4_epi32(moved, 1));
    sum = _mm_xor_si128(sum, _mm512_extracti32x4_epi32(moved, 2));
    uint64_t crc = _mm_crc32_u64(0, (uint64_t)_mm_cvtsi128_si64(sum));
    return (uint32_t)_mm_crc32_u64(crc, (uint64_t)_mm_extract_epi64(sum, 1));
}

FOLDING void zinf_fold_pages(const char *data, size_t pages, uint32_t *crcs)
{
    __m512i streams = _mm512_loadu_si512(by.streams), vector = _mm512_loadu_si512(by.vector);
    for (size_t k = 0; k < pages; k++, data += ZINF_PAGE) {
        __m512i a = _mm512_loadu_si512(data), b = _mm512_loadu_si512(data + VECTOR);
        __m512i c = _mm512_loadu_si512(data + 2 * VECTOR), d = _mm512_loadu_si512(data + 3 * VECTOR);
        a = _mm512_xor_si512(a, _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)~crcs[k])));
        for (size_t i = STREAMS * VECTOR; i < ZINF_PAGE; i += STREAMS * VECTOR) {
            for (size_t line = 0; line < STREAMS * VECTOR; line += CACHE_LINE)
                __builtin_prefetch(data + AHEAD + i + line);
            a = fold(a, streams, _mm512_loadu_si512(data + i));
            b = fold(b, streams, _mm512_loadu_si512(data + i + VECTOR));
            c = fold(c, streams, _mm512_loadu_si512(data + i + 2 * VECTOR));
            d = fold(d, streams, _mm512_loadu_si512(data + i + 3 * VECTOR));
        }
        crcs[k] = ~reduce(fold(fold(fold(a, vector, b), vector, c), vector, d));
    }
}

#else

#include <stdlib.h>

bool zinf_prepare_folding(void)
{
    return false;
}

void zinf_fold_pages(const char *data, size_t pages, uint32_t *crcs)
{
    (void)data, (void)pages, (void)crcs;
    abort();
}

#endif

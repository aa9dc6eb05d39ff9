/* Vectors of AVX2, two at a time: see update.c. The first has of each eight consecutive elements the first four, as
 * instructions that interleave and pack leave them. */

typedef __m256 vector_avx2;

enum { LANES_avx2 = 8, PARTS_avx2 = 2 };

static inline __m256 all_avx2(float value) { return _mm256_set1_ps(value); }
static inline __m256 load_avx2(const float *values) { return _mm256_loadu_ps(values); }
static inline void store_avx2(float *target, __m256 values) { _mm256_storeu_ps(target, values); }
static inline __m256 fma_avx2(__m256 a, __m256 b, __m256 c) { return _mm256_fmadd_ps(a, b, c); }
static inline __m256 sqrt_avx2(__m256 values) { return _mm256_sqrt_ps(values); }
static inline __m256i bits_avx2(__m256 values) { return _mm256_castps_si256(values); }

static inline __m256i magnitude_avx2(__m256i bits) { return _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff)); }

static inline __m256 maximum_avx2(__m256 largest, __m256 values, int propagates)
{
    const __m256 maximum = _mm256_max_ps(values, largest); /* which is `largest` where one is NaN */
    return propagates ? _mm256_blendv_ps(maximum, values, _mm256_cmp_ps(values, values, _CMP_UNORD_Q)) : maximum;
}

/* From the order of the elements to that of the vectors, or back. */
static inline void change_order_avx2(__m256 first, __m256 second, __m256 *values)
{
    values[0] = _mm256_permute2f128_ps(first, second, 0x20);
    values[1] = _mm256_permute2f128_ps(first, second, 0x31);
}

static inline void of_fp32_avx2(const float *stored, __m256 *values)
{
    change_order_avx2(load_avx2(stored), load_avx2(stored + 8), values);
}

static inline void to_fp32_avx2(float *stored, const __m256 *values)
{
    __m256 in_order[2];
    change_order_avx2(values[0], values[1], in_order);
    store_avx2(stored, in_order[0]), store_avx2(stored + 8, in_order[1]);
}

static inline void of_fp16_avx2(const uint16_t *stored, __m256 *values)
{
    const __m128i *halves = (const __m128i *)stored;
    change_order_avx2(_mm256_cvtph_ps(_mm_loadu_si128(halves)), _mm256_cvtph_ps(_mm_loadu_si128(halves + 1)), values);
}

static inline void to_fp16_avx2(uint16_t *stored, const __m256 *values)
{
    __m256 in_order[2];
    change_order_avx2(values[0], values[1], in_order);
    for (int half = 0; half < 2; half++)
        _mm_storeu_si128((__m128i *)stored + half, _mm256_cvtps_ph(in_order[half], _MM_FROUND_TO_NEAREST_INT));
}

/* fp32 of their halves of 16 bits. */
static inline void of_halves_avx2(__m256i lower, __m256i upper, __m256 *values)
{
    values[0] = _mm256_castsi256_ps(_mm256_unpacklo_epi16(lower, upper));
    values[1] = _mm256_castsi256_ps(_mm256_unpackhi_epi16(lower, upper));
}

static inline __m256i upper_avx2(const __m256 *values)
{
    return _mm256_packus_epi32(_mm256_srli_epi32(bits_avx2(values[0]), 16),
                               _mm256_srli_epi32(bits_avx2(values[1]), 16));
}

static inline __m256i lower_avx2(const __m256 *values)
{
    const __m256i zero = _mm256_setzero_si256();
    return _mm256_packus_epi32(_mm256_blend_epi16(bits_avx2(values[0]), zero, 0xaa),
                               _mm256_blend_epi16(bits_avx2(values[1]), zero, 0xaa));
}

/* Which values are rounded to bf16 by adding one to their upper halves. */
static inline __m256i is_raised_avx2(__m256i lower, __m256i upper)
{
    const __m256i odd = _mm256_and_si256(upper, _mm256_set1_epi16(1)); /* signed numbers are compared */
    return _mm256_cmpgt_epi16(_mm256_xor_si256(lower, _mm256_set1_epi16(-0x8000)),
                              _mm256_sub_epi16(_mm256_setzero_si256(), odd));
}

static inline __m256i is_finite_avx2(__m256i upper)
{
    const __m256i magnitude = _mm256_and_si256(upper, _mm256_set1_epi16(0x7fff));
    return _mm256_cmpgt_epi16(_mm256_set1_epi16(0x7f80), magnitude);
}

/* The values as bf16, whose halves are given, and which of those are not the upper ones. */
static inline __m256i rounded_avx2(__m256i lower, __m256i upper, __m256i *raised)
{
    *raised = is_raised_avx2(lower, upper);
    const __m256i rounded = _mm256_sub_epi16(upper, *raised), finite = is_finite_avx2(upper);
    if (__builtin_expect(_mm256_movemask_epi8(finite) == -1, 1))
        return rounded;
    const __m256i infinite = _mm256_set1_epi16(0x7f80), magnitude = _mm256_and_si256(upper, _mm256_set1_epi16(0x7fff));
    const __m256i is_infinite = _mm256_and_si256(_mm256_cmpeq_epi16(magnitude, infinite),
                                                 _mm256_cmpeq_epi16(lower, _mm256_setzero_si256()));
    const __m256i bf16 = _mm256_blendv_epi8(_mm256_set1_epi16(0x7fc0), rounded, _mm256_or_si256(finite, is_infinite));
    *raised = _mm256_xor_si256(_mm256_cmpeq_epi16(bf16, upper), _mm256_set1_epi16(-1));
    return bf16;
}

static inline __m256i load_halves_avx2(const uint16_t *halves) { return _mm256_loadu_si256((const __m256i *)halves); }
static inline void store_halves_avx2(uint16_t *stored, __m256i halves) { _mm256_storeu_si256((__m256i *)stored, halves); }

static inline void of_bf16_avx2(const uint16_t *stored, __m256 *values)
{
    of_halves_avx2(_mm256_setzero_si256(), load_halves_avx2(stored), values);
}

static inline void to_bf16_avx2(uint16_t *stored, const __m256 *values)
{
    __m256i raised;
    store_halves_avx2(stored, rounded_avx2(lower_avx2(values), upper_avx2(values), &raised));
}

static inline void of_codes_avx2(const uint8_t *codes, const float *table, __m256 *values)
{
    const __m256i pairs = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)codes)), zero = _mm256_setzero_si256();
    values[0] = _mm256_i32gather_ps(table, _mm256_unpacklo_epi16(pairs, zero), 4);
    values[1] = _mm256_i32gather_ps(table, _mm256_unpackhi_epi16(pairs, zero), 4);
}

static inline __m256i code_avx2(__m256i bits, const uint32_t *places)
{
    const __m256i lower = _mm256_blend_epi16(_mm256_xor_si256(bits, _mm256_srai_epi32(bits, 31)),
                                             _mm256_setzero_si256(), 0xaa);
    const __m256i place = _mm256_i32gather_epi32((const int *)places, _mm256_srli_epi32(bits, 16), 4);
    return _mm256_srli_epi32(_mm256_add_epi32(place, lower), 16);
}

static inline __m128i bytes_avx2(__m256i pairs)
{
    return _mm_packus_epi16(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
}

static inline void to_codes_avx2(uint8_t *codes, const __m256 *values, const uint32_t *places)
{
    const __m256i first = code_avx2(bits_avx2(values[0]), places), second = code_avx2(bits_avx2(values[1]), places);
    _mm_storeu_si128((__m128i *)codes, bytes_avx2(_mm256_packus_epi32(first, second)));
}

static inline __m256 largest_of_avx2(__m256 largest, __m256 values)
{
    return _mm256_castsi256_ps(_mm256_max_epu32(bits_avx2(largest), magnitude_avx2(bits_avx2(values))));
}

static inline float largest_avx2(__m256 largest)
{
    float values[LANES_avx2], whole = 0;
    store_avx2(values, largest);
    for (int i = 0; i < LANES_avx2; i++) whole = largest_of_plain(whole, values[i]);
    return whole;
}

/* As bits_of_master. */
static inline void join_avx2(const uint16_t *weights, const uint16_t *lower, const uint8_t *up, size_t i,
                             __m256 *masters)
{
    const __m256i weight = load_halves_avx2(weights + i), rest = load_halves_avx2(lower + i);
    const __m256i bits = _mm256_setr_epi16(1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384,
                                           -32768);
    uint16_t both;
    memcpy(&both, up + i / 8, sizeof both);
    const __m256i raised = _mm256_cmpeq_epi16(_mm256_and_si256(_mm256_set1_epi16((short)both), bits), bits); /* or -1 */
    const __m256i upper = _mm256_add_epi16(weight, raised);
    const __m256i is_of_weight = _mm256_andnot_si256(_mm256_xor_si256(is_raised_avx2(rest, upper), raised),
                                                     is_finite_avx2(upper));
    of_halves_avx2(_mm256_and_si256(rest, is_of_weight), _mm256_blendv_epi8(weight, upper, is_of_weight), masters);
}

static inline void split_avx2(uint16_t *weights, uint16_t *lower, uint8_t *up, size_t i, const __m256 *masters)
{
    const __m256i rest = lower_avx2(masters);
    __m256i raised;
    store_halves_avx2(weights + i, rounded_avx2(rest, upper_avx2(masters), &raised));
    store_halves_avx2(lower + i, rest);
    const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(raised), _mm256_extracti128_si256(raised, 1));
    const uint16_t bits = (uint16_t)_mm_movemask_epi8(bytes);
    memcpy(up + i / 8, &bits, sizeof bits);
}

/* Vectors of AVX-512, two at a time: see update.c. The first has of each eight consecutive elements the first four, as
 * instructions that interleave and pack leave them. */

typedef __m512 vector_avx512;

enum { LANES_avx512 = 16, PARTS_avx512 = 2 };

static inline __m512 all_avx512(float value) { return _mm512_set1_ps(value); }
static inline __m512 load_avx512(const float *values) { return _mm512_loadu_ps(values); }
static inline void store_avx512(float *target, __m512 values) { _mm512_storeu_ps(target, values); }
static inline __m512 fma_avx512(__m512 a, __m512 b, __m512 c) { return _mm512_fmadd_ps(a, b, c); }
static inline __m512 sqrt_avx512(__m512 values) { return _mm512_sqrt_ps(values); }
static inline __m512i bits_avx512(__m512 values) { return _mm512_castps_si512(values); }

static inline __m512i magnitude_avx512(__m512i bits) { return _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff)); }

static inline __m512 maximum_avx512(__m512 largest, __m512 values, int propagates)
{
    const __m512 maximum = _mm512_max_ps(values, largest); /* which is `largest` where one is NaN */
    const __mmask16 nan = propagates ? _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q) : 0;
    return _mm512_mask_mov_ps(maximum, nan, values);
}

static inline void of_order_avx512(__m512 first, __m512 second, __m512 *values)
{
    values[0] = _mm512_shuffle_f32x4(first, second, 0x88);
    values[1] = _mm512_shuffle_f32x4(first, second, 0xdd);
}

static inline __m512 in_order_avx512(const __m512 *values, int half)
{
    const __m512i of_half[2] = {_mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11),
                                _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15)};
    const __m512d a = _mm512_castps_pd(values[0]), b = _mm512_castps_pd(values[1]);
    return _mm512_castpd_ps(_mm512_permutex2var_pd(a, of_half[half], b));
}

static inline void of_fp32_avx512(const float *stored, __m512 *values)
{
    of_order_avx512(load_avx512(stored), load_avx512(stored + 16), values);
}

static inline void to_fp32_avx512(float *stored, const __m512 *values)
{
    store_avx512(stored, in_order_avx512(values, 0));
    store_avx512(stored + 16, in_order_avx512(values, 1));
}

static inline void of_fp16_avx512(const uint16_t *stored, __m512 *values)
{
    const __m256i *halves = (const __m256i *)stored;
    of_order_avx512(_mm512_cvtph_ps(_mm256_loadu_si256(halves)), _mm512_cvtph_ps(_mm256_loadu_si256(halves + 1)),
                    values);
}

static inline void to_fp16_avx512(uint16_t *stored, const __m512 *values)
{
    for (int half = 0; half < 2; half++)
        _mm256_storeu_si256((__m256i *)stored + half,
                            _mm512_cvtps_ph(in_order_avx512(values, half), _MM_FROUND_TO_NEAREST_INT));
}

/* fp32 of their halves of 16 bits. */
static inline void of_halves_avx512(__m512i lower, __m512i upper, __m512 *values)
{
    values[0] = _mm512_castsi512_ps(_mm512_unpacklo_epi16(lower, upper));
    values[1] = _mm512_castsi512_ps(_mm512_unpackhi_epi16(lower, upper));
}

static inline __m512i upper_avx512(const __m512 *values)
{
    return _mm512_packus_epi32(_mm512_srli_epi32(bits_avx512(values[0]), 16),
                               _mm512_srli_epi32(bits_avx512(values[1]), 16));
}

static inline __m512i lower_avx512(const __m512 *values)
{
    const __m512i half = _mm512_set1_epi32(0xffff);
    return _mm512_packus_epi32(_mm512_and_si512(bits_avx512(values[0]), half),
                               _mm512_and_si512(bits_avx512(values[1]), half));
}

/* Which values are rounded to bf16 by adding one to their upper halves. */
static inline __mmask32 is_raised_avx512(__m512i lower, __m512i upper)
{
    const __m512i odd = _mm512_and_si512(upper, _mm512_set1_epi16(1));
    return _mm512_cmpgt_epu16_mask(lower, _mm512_sub_epi16(_mm512_set1_epi16(-0x8000), odd));
}

static inline __mmask32 is_finite_avx512(__m512i upper)
{
    const __m512i magnitude = _mm512_and_si512(upper, _mm512_set1_epi16(0x7fff));
    return _mm512_cmplt_epu16_mask(magnitude, _mm512_set1_epi16(0x7f80));
}

/* The values as bf16, whose halves are given, and which of those are not the upper ones. */
static inline __m512i rounded_avx512(__m512i lower, __m512i upper, __mmask32 *raised)
{
    *raised = is_raised_avx512(lower, upper);
    const __m512i rounded = _mm512_mask_add_epi16(upper, *raised, upper, _mm512_set1_epi16(1));
    const __mmask32 others = ~is_finite_avx512(upper);
    if (__builtin_expect(!others, 1))
        return rounded;
    const __m512i infinite = _mm512_set1_epi16(0x7f80), magnitude = _mm512_and_si512(upper, _mm512_set1_epi16(0x7fff));
    const __mmask32 nan = others & (_mm512_cmpneq_epi16_mask(magnitude, infinite) | _mm512_test_epi16_mask(lower,
                                                                                                           lower));
    const __m512i bf16 = _mm512_mask_mov_epi16(rounded, nan, _mm512_set1_epi16(0x7fc0));
    *raised = _mm512_cmpneq_epi16_mask(bf16, upper);
    return bf16;
}

static inline void of_bf16_avx512(const uint16_t *stored, __m512 *values)
{
    of_halves_avx512(_mm512_setzero_si512(), _mm512_loadu_si512(stored), values);
}

static inline void to_bf16_avx512(uint16_t *stored, const __m512 *values)
{
    __mmask32 raised;
    _mm512_storeu_si512(stored, rounded_avx512(lower_avx512(values), upper_avx512(values), &raised));
}

static inline void of_codes_avx512(const uint8_t *codes, const float *table, __m512 *values)
{
    const __m512i pairs = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)codes)),
        zero = _mm512_setzero_si512();
    values[0] = _mm512_mask_i32gather_ps(_mm512_setzero_ps(), 0xffff, _mm512_unpacklo_epi16(pairs, zero), table, 4);
    values[1] = _mm512_mask_i32gather_ps(_mm512_setzero_ps(), 0xffff, _mm512_unpackhi_epi16(pairs, zero), table, 4);
}

static inline __m512i code_avx512(__m512i bits, const uint32_t *places)
{
    /* (bits ^ bits >> 31) & 0xffff */
    const __m512i lower =
        _mm512_ternarylogic_epi32(bits, _mm512_srai_epi32(bits, 31), _mm512_set1_epi32(0xffff), (0xf0 ^ 0xcc) & 0xaa);
    const __m512i place = _mm512_mask_i32gather_epi32(_mm512_setzero_si512(), 0xffff, _mm512_srli_epi32(bits, 16),
                                                      places, 4);
    return _mm512_srli_epi32(_mm512_add_epi32(place, lower), 16);
}

static inline void to_codes_avx512(uint8_t *codes, const __m512 *values, const uint32_t *places)
{
    const __m512i first = code_avx512(bits_avx512(values[0]), places),
        second = code_avx512(bits_avx512(values[1]), places);
    _mm256_storeu_si256((__m256i *)codes, _mm512_cvtepi16_epi8(_mm512_packus_epi32(first, second)));
}

static inline __m512 largest_of_avx512(__m512 largest, __m512 values)
{
    return _mm512_castsi512_ps(_mm512_max_epu32(bits_avx512(largest), magnitude_avx512(bits_avx512(values))));
}

static inline float largest_avx512(__m512 largest) { return of_bits(_mm512_reduce_max_epu32(bits_avx512(largest))); }

/* As bits_of_master. */
static inline void join_avx512(const uint16_t *weights, const uint16_t *lower, const uint8_t *up, size_t i,
                               __m512 *masters)
{
    const __m512i weight = _mm512_loadu_si512(weights + i), rest = _mm512_loadu_si512(lower + i);
    __mmask32 raised;
    memcpy(&raised, up + i / 8, sizeof raised);
    const __m512i upper = _mm512_mask_sub_epi16(weight, raised, weight, _mm512_set1_epi16(1));
    const __mmask32 is_of_weight = ~(is_raised_avx512(rest, upper) ^ raised) & is_finite_avx512(upper);
    of_halves_avx512(_mm512_maskz_mov_epi16(is_of_weight, rest), _mm512_mask_mov_epi16(weight, is_of_weight, upper),
                     masters);
}

static inline void split_avx512(uint16_t *weights, uint16_t *lower, uint8_t *up, size_t i, const __m512 *masters)
{
    const __m512i rest = lower_avx512(masters);
    __mmask32 raised;
    _mm512_storeu_si512(weights + i, rounded_avx512(rest, upper_avx512(masters), &raised));
    _mm512_storeu_si512(lower + i, rest);
    memcpy(up + i / 8, &raised, sizeof raised);
}

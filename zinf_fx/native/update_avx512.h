/* Vectors of AVX-512: see update.c. */

typedef __m512 vector_avx512;

enum { LANES_avx512 = 16 };

static inline __m512 all_avx512(float value) { return _mm512_set1_ps(value); }
static inline __m512 load_avx512(const float *values) { return _mm512_loadu_ps(values); }
static inline void store_avx512(float *target, __m512 values) { _mm512_storeu_ps(target, values); }
static inline __m512 fma_avx512(__m512 a, __m512 b, __m512 c) { return _mm512_fmadd_ps(a, b, c); }
static inline __m512 sqrt_avx512(__m512 values) { return _mm512_sqrt_ps(values); }
static inline __m512i bits_avx512(__m512 values) { return _mm512_castps_si512(values); }

static inline __m512i magnitude_avx512(__m512i bits) { return _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff)); }

static inline __m512 if_finite_avx512(__m512 values, __m512 then, __m512 otherwise)
{
    const __m512i magnitude = magnitude_avx512(bits_avx512(values)), infinite = _mm512_set1_epi32(0x7f800000);
    return _mm512_mask_mov_ps(otherwise, _mm512_cmplt_epu32_mask(magnitude, infinite), then);
}

static inline __m512 maximum_avx512(__m512 largest, __m512 values, int propagates)
{
    const __m512 maximum = _mm512_max_ps(values, largest); /* which is `largest` where one is NaN */
    const __mmask16 nan = propagates ? _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q) : 0;
    return _mm512_mask_mov_ps(maximum, nan, values);
}

/* Sixteen integers of 16 bits, each in 32. */
static inline __m512i widened_avx512(const uint16_t *halves)
{
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)halves));
}

static inline void narrowed_avx512(uint16_t *halves, __m512i values)
{
    _mm256_storeu_si256((__m256i *)halves, _mm512_cvtepi32_epi16(values));
}

static inline __m512i rounded_avx512(__m512i bits)
{
    const __m512i even = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    return _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(even, _mm512_set1_epi32(0x7fff))), 16);
}

static inline __mmask16 is_nan_avx512(__m512i bits)
{
    return _mm512_cmpgt_epu32_mask(magnitude_avx512(bits), _mm512_set1_epi32(0x7f800000));
}

static inline __m512i bf16_avx512(__m512i bits)
{
    return _mm512_mask_mov_epi32(rounded_avx512(bits), is_nan_avx512(bits), _mm512_set1_epi32(0x7fc0));
}

static inline __m512 of_bf16_avx512(const uint16_t *halves)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(widened_avx512(halves), 16));
}

static inline void to_bf16_avx512(uint16_t *halves, __m512 values)
{
    narrowed_avx512(halves, bf16_avx512(bits_avx512(values)));
}

static inline __m512 of_fp16_avx512(const uint16_t *halves)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)halves));
}

static inline void to_fp16_avx512(uint16_t *halves, __m512 values)
{
    _mm256_storeu_si256((__m256i *)halves, _mm512_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT));
}

static inline __m512 of_codes_avx512(const uint8_t *codes, const float *table)
{
    return _mm512_i32gather_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)codes)), table, 4);
}

static inline void to_codes_avx512(uint8_t *codes, __m512 values, const uint32_t *places)
{
    const __m512i bits = bits_avx512(values), half = _mm512_set1_epi32(0xffff);
    const __m512i lower = _mm512_and_si512(_mm512_xor_si512(bits, _mm512_srai_epi32(bits, 31)), half);
    const __m512i place = _mm512_i32gather_epi32(_mm512_srli_epi32(bits, 16), places, 4);
    const __m512i found = _mm512_srli_epi32(_mm512_add_epi32(place, lower), 16);
    _mm_storeu_si128((__m128i *)codes, _mm512_cvtepi32_epi8(found));
}

static inline __m512 largest_of_avx512(__m512 largest, __m512 values)
{
    return _mm512_castsi512_ps(_mm512_max_epu32(bits_avx512(largest), magnitude_avx512(bits_avx512(values))));
}

static inline float largest_avx512(__m512 largest) { return of_bits(_mm512_reduce_max_epu32(bits_avx512(largest))); }

static inline __m512 join_avx512(const uint16_t *weights, const uint16_t *lower, const uint8_t *up, size_t i)
{
    const __m512i weight = widened_avx512(weights + i);
    const __mmask16 raised = (__mmask16)(up[i / 8] | up[i / 8 + 1] << 8);
    const __m512i upper = _mm512_slli_epi32(_mm512_mask_sub_epi32(weight, raised, weight, _mm512_set1_epi32(1)), 16);
    const __m512i bits = _mm512_or_si512(upper, widened_avx512(lower + i));
    const __mmask16 is_of_weight = _mm512_mask_cmpeq_epi32_mask(~is_nan_avx512(bits), rounded_avx512(bits), weight);
    return _mm512_castsi512_ps(_mm512_mask_mov_epi32(_mm512_slli_epi32(weight, 16), is_of_weight, bits));
}

static inline void split_avx512(uint16_t *weights, uint16_t *lower, uint8_t *up, size_t i, __m512 masters)
{
    const __m512i bits = bits_avx512(masters), weight = bf16_avx512(bits);
    narrowed_avx512(weights + i, weight);
    narrowed_avx512(lower + i, bits);
    const __mmask16 raised = _mm512_cmpneq_epi32_mask(_mm512_srli_epi32(bits, 16), weight);
    up[i / 8] = (uint8_t)raised, up[i / 8 + 1] = (uint8_t)(raised >> 8);
}

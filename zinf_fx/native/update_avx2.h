/* Vectors of AVX2: see update.c. */

typedef __m256 vector_avx2;

enum { LANES_avx2 = 8 };

static inline __m256 all_avx2(float value) { return _mm256_set1_ps(value); }
static inline __m256 load_avx2(const float *values) { return _mm256_loadu_ps(values); }
static inline void store_avx2(float *target, __m256 values) { _mm256_storeu_ps(target, values); }
static inline __m256 fma_avx2(__m256 a, __m256 b, __m256 c) { return _mm256_fmadd_ps(a, b, c); }
static inline __m256 sqrt_avx2(__m256 values) { return _mm256_sqrt_ps(values); }
static inline __m256i bits_avx2(__m256 values) { return _mm256_castps_si256(values); }

static inline __m256i magnitude_avx2(__m256i bits) { return _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff)); }

static inline __m256 if_finite_avx2(__m256 values, __m256 then, __m256 otherwise)
{
    const __m256i finite = _mm256_cmpgt_epi32(_mm256_set1_epi32(0x7f800000), magnitude_avx2(bits_avx2(values)));
    return _mm256_blendv_ps(otherwise, then, _mm256_castsi256_ps(finite));
}

static inline __m256 maximum_avx2(__m256 largest, __m256 values, int propagates)
{
    const __m256 maximum = _mm256_max_ps(values, largest); /* which is `largest` where one is NaN */
    return propagates ? _mm256_blendv_ps(maximum, values, _mm256_cmp_ps(values, values, _CMP_UNORD_Q)) : maximum;
}

/* Eight integers of 16 bits, each in 32. */
static inline __m256i widened_avx2(const uint16_t *halves)
{
    return _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)halves));
}

static inline void narrowed_avx2(uint16_t *halves, __m256i values)
{
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(values, values), 0x08);
    _mm_storeu_si128((__m128i *)halves, _mm256_castsi256_si128(packed));
}

static inline __m256i rounded_avx2(__m256i bits)
{
    const __m256i even = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    return _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(even, _mm256_set1_epi32(0x7fff))), 16);
}

static inline __m256i is_nan_avx2(__m256i bits)
{
    return _mm256_cmpgt_epi32(magnitude_avx2(bits), _mm256_set1_epi32(0x7f800000));
}

static inline __m256i bf16_avx2(__m256i bits)
{
    return _mm256_blendv_epi8(rounded_avx2(bits), _mm256_set1_epi32(0x7fc0), is_nan_avx2(bits));
}

static inline __m256 of_bf16_avx2(const uint16_t *halves)
{
    return _mm256_castsi256_ps(_mm256_slli_epi32(widened_avx2(halves), 16));
}

static inline void to_bf16_avx2(uint16_t *halves, __m256 values)
{
    narrowed_avx2(halves, bf16_avx2(bits_avx2(values)));
}

static inline __m256 of_fp16_avx2(const uint16_t *halves)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)halves));
}

static inline void to_fp16_avx2(uint16_t *halves, __m256 values)
{
    _mm_storeu_si128((__m128i *)halves, _mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT));
}

static inline __m256 of_codes_avx2(const uint8_t *codes, const float *table)
{
    return _mm256_i32gather_ps(table, _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)codes)), 4);
}

static inline void to_codes_avx2(uint8_t *codes, __m256 values, const uint32_t *places)
{
    const __m256i bits = bits_avx2(values), half = _mm256_set1_epi32(0xffff);
    const __m256i lower = _mm256_and_si256(_mm256_xor_si256(bits, _mm256_srai_epi32(bits, 31)), half);
    const __m256i place = _mm256_i32gather_epi32((const int *)places, _mm256_srli_epi32(bits, 16), 4);
    const __m256i found = _mm256_srli_epi32(_mm256_add_epi32(place, lower), 16);
    const __m256i pairs = _mm256_permute4x64_epi64(_mm256_packus_epi32(found, found), 0x08);
    _mm_storel_epi64((__m128i *)codes, _mm256_castsi256_si128(_mm256_packus_epi16(pairs, pairs)));
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

static inline __m256 join_avx2(const uint16_t *weights, const uint16_t *lower, const uint8_t *up, size_t i)
{
    const __m256i weight = widened_avx2(weights + i), each = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i raised = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(up[i / 8]), each), each); /* or -1 */
    const __m256i upper = _mm256_slli_epi32(_mm256_add_epi32(weight, raised), 16);
    const __m256i bits = _mm256_or_si256(upper, widened_avx2(lower + i));
    const __m256i is_of_weight = _mm256_andnot_si256(is_nan_avx2(bits), _mm256_cmpeq_epi32(rounded_avx2(bits), weight));
    return _mm256_castsi256_ps(_mm256_blendv_epi8(_mm256_slli_epi32(weight, 16), bits, is_of_weight));
}

static inline void split_avx2(uint16_t *weights, uint16_t *lower, uint8_t *up, size_t i, __m256 masters)
{
    const __m256i bits = bits_avx2(masters), weight = bf16_avx2(bits);
    narrowed_avx2(weights + i, weight);
    narrowed_avx2(lower + i, _mm256_and_si256(bits, _mm256_set1_epi32(0xffff)));
    const __m256i same = _mm256_cmpeq_epi32(_mm256_srli_epi32(bits, 16), weight);
    up[i / 8] = (uint8_t)~_mm256_movemask_ps(_mm256_castsi256_ps(same));
}

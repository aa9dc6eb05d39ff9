/* Vectors of one element, one at a time: see update.c. */

typedef float vector_plain;

enum { LANES_plain = 1, PARTS_plain = 1 };

static inline uint32_t bits_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float of_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline float all_plain(float value) { return value; }
static inline float load_plain(const float *values) { return *values; }
static inline void store_plain(float *target, float value) { *target = value; }
static inline float fma_plain(float a, float b, float c) { return fmaf(a, b, c); }
static inline float sqrt_plain(float value) { return sqrtf(value); }
static inline void of_fp32_plain(const float *stored, float *value) { *value = *stored; }
static inline void to_fp32_plain(float *stored, const float *value) { *stored = *value; }

/* `propagates`: whether the maximum with NaN is NaN; else `value` is taken only where it is larger. */
static inline float maximum_plain(float largest, float value, int propagates)
{
    return largest < value || (propagates && isnan(value)) ? value : largest;
}

static inline void of_bf16_plain(const uint16_t *stored, float *value) { *value = of_bits((uint32_t)*stored << 16); }

/* To nearest and to even. */
static inline uint16_t bf16_of(float value)
{
    const uint32_t bits = bits_of(value);
    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : (bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static inline void to_bf16_plain(uint16_t *stored, const float *value) { *stored = bf16_of(*value); }

static inline void of_fp16_plain(const uint16_t *stored, float *value)
{
    const uint32_t magnitude = *stored & 0x7fffu, sign = (*stored & 0x8000u) << 16;
    if (magnitude >= 0x7c00)
        *value = of_bits(sign | magnitude << 13 | 0x7f800000 | (magnitude > 0x7c00 ? 0x400000 : 0));
    else if (magnitude >= 0x400)
        *value = of_bits(sign | (0x38000000 + (magnitude << 13)));
    else /* subnormal: of its integer, because subnormal numbers of fp32 may be flushed to zero */
        *value = of_bits(sign | bits_of((float)magnitude * 0x1p-24f));
}

/* To nearest and to even. */
static inline void to_fp16_plain(uint16_t *stored, const float *value)
{
    const uint32_t sign = bits_of(*value) >> 16 & 0x8000, magnitude = bits_of(*value) & 0x7fffffff;
    uint32_t half;
    if (magnitude > 0x7f800000)
        half = 0x7e00 | (magnitude >> 13 & 0x3ff);
    else if (magnitude >= 0x47800000)
        half = 0x7c00;
    else if (magnitude < 0x38800000)
        half = bits_of(of_bits(magnitude) + 0.5f) - 0x3f000000;
    else
        half = (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13;
    *stored = (uint16_t)(sign | half);
}

static inline void of_codes_plain(const uint8_t *codes, const float *table, float *value) { *value = table[*codes]; }

static inline void to_codes_plain(uint8_t *codes, const float *value, const uint32_t *places)
{
    const int32_t bits = (int32_t)bits_of(*value);
    *codes = (uint8_t)((places[(uint32_t)bits >> 16] + ((uint32_t)(bits ^ bits >> 31) & 0xffff)) >> 16);
}

static inline float largest_of_plain(float largest, float value)
{
    const uint32_t magnitude = bits_of(value) & 0x7fffffff;
    return of_bits(bits_of(largest) < magnitude ? magnitude : bits_of(largest));
}

static inline float largest_plain(float largest) { return largest; }

static inline void join_plain(const uint16_t *weights, const uint16_t *lower, const uint8_t *up, size_t i,
                              float *master)
{
    *master = of_bits(bits_of_master(weights[i], up[i / 8] >> i % 8 & 1u, lower[i]));
}

static inline void split_plain(uint16_t *weights, uint16_t *lower, uint8_t *up, size_t i, const float *master)
{
    const uint32_t bits = bits_of(*master);
    weights[i] = bf16_of(*master);
    lower[i] = (uint16_t)bits;
    const int raised = bits >> 16 != weights[i];
    up[i / 8] = (uint8_t)((up[i / 8] & ~(1 << i % 8)) | raised << i % 8); /* the others are to be read yet */
}

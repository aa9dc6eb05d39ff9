#include "checksum.h"

#include <errno.h>
#include <pthread.h>
#include <string.h>

#if defined(__x86_64__)
#include <nmmintrin.h>
#endif

enum {
    AT_A_TIME = 4, /* pages whose checksums are computed together, to hide the instruction's latency */
    CACHE_LINE = 64,
};

static const uint32_t POLYNOMIAL = 0x82f63b78; /* bits reflected */
static uint32_t tables[8][256];
static uint32_t page_behind[4][256]; /* what a checksum's bytes become when a page of zeros is behind them */
static pthread_once_t once = PTHREAD_ONCE_INIT;
static bool in_hardware, by_folding;

static void prepare(void)
{
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t crc = i;
        for (int bit = 0; bit < 8; bit++)
            crc = crc >> 1 ^ (crc & 1 ? POLYNOMIAL : 0);
        tables[0][i] = crc;
    }
    for (int k = 1; k < 8; k++)
        for (int i = 0; i < 256; i++)
            tables[k][i] = tables[k - 1][i] >> 8 ^ tables[0][tables[k - 1][i] & 255];
    uint32_t bits[32]; /* of a checksum, alone; linear, so that the others are sums of these */
    for (int bit = 0; bit < 32; bit++) {
        bits[bit] = (uint32_t)1 << bit;
        for (int i = 0; i < ZINF_PAGE; i++)
            bits[bit] = bits[bit] >> 8 ^ tables[0][bits[bit] & 255];
    }
    for (int byte = 0; byte < 4; byte++)
        for (int i = 0; i < 256; i++)
            for (int bit = 0; bit < 8; bit++)
                page_behind[byte][i] ^= i >> bit & 1 ? bits[8 * byte + bit] : 0;
#if defined(__x86_64__)
    in_hardware = __builtin_cpu_supports("sse4.2");
#endif
    by_folding = zinf_prepare_folding();
}

int zinf_crc32c_in_hardware(void)
{
    pthread_once(&once, prepare);
    return in_hardware;
}

/* Eight bytes at a time, one table for each of them. */
uint32_t zinf_crc32c_by_table(uint32_t crc, const void *data, size_t length)
{
    const unsigned char *bytes = data;
    pthread_once(&once, prepare);
    crc = ~crc;
    for (; length >= 8; length -= 8, bytes += 8) {
        crc ^= (uint32_t)bytes[0] | (uint32_t)bytes[1] << 8 | (uint32_t)bytes[2] << 16 | (uint32_t)bytes[3] << 24;
        crc = tables[7][crc & 255] ^ tables[6][crc >> 8 & 255] ^ tables[5][crc >> 16 & 255] ^ tables[4][crc >> 24] ^
              tables[3][bytes[4]] ^ tables[2][bytes[5]] ^ tables[1][bytes[6]] ^ tables[0][bytes[7]];
    }
    for (; length; length--, bytes++)
        crc = crc >> 8 ^ tables[0][(crc ^ *bytes) & 255];
    return ~crc;
}

#if defined(__x86_64__)

__attribute__((target("sse4.2"))) static uint32_t crc32c_by_instruction(uint32_t crc, const char *data, size_t length)
{
    uint64_t state = ~crc;
    for (; length >= 8; length -= 8, data += 8) {
        uint64_t word;
        memcpy(&word, data, 8);
        state = _mm_crc32_u64(state, word);
    }
    for (; length; length--, data++)
        state = _mm_crc32_u8((uint32_t)state, (unsigned char)*data);
    return ~(uint32_t)state;
}

/* Continues four checksums over four consecutive pages. The processor prefetches within a page only: the next four are
 * asked for here, which doubles the speed on data that isn't in a cache. Asking beyond the data's end does nothing. */
__attribute__((target("sse4.2"))) static void four_pages(const char *data, uint32_t crcs[AT_A_TIME])
{
    uint64_t a = ~crcs[0], b = ~crcs[1], c = ~crcs[2], d = ~crcs[3];
    for (size_t i = 0; i < ZINF_PAGE; i += 8) {
        uint64_t words[AT_A_TIME];
        if (i % CACHE_LINE == 0)
            for (size_t k = 0; k < AT_A_TIME; k++)
                __builtin_prefetch(data + (AT_A_TIME + k) * ZINF_PAGE + i);
        for (size_t k = 0; k < AT_A_TIME; k++)
            memcpy(&words[k], data + k * ZINF_PAGE + i, 8);
        a = _mm_crc32_u64(a, words[0]);
        b = _mm_crc32_u64(b, words[1]);
        c = _mm_crc32_u64(c, words[2]);
        d = _mm_crc32_u64(d, words[3]);
    }
    crcs[0] = ~(uint32_t)a;
    crcs[1] = ~(uint32_t)b;
    crcs[2] = ~(uint32_t)c;
    crcs[3] = ~(uint32_t)d;
}

#else

static uint32_t crc32c_by_instruction(uint32_t crc, const char *data, size_t length)
{
    return zinf_crc32c_by_table(crc, data, length);
}

static void four_pages(const char *data, uint32_t crcs[AT_A_TIME])
{
    for (size_t k = 0; k < AT_A_TIME; k++)
        crcs[k] = zinf_crc32c_by_table(crcs[k], data + k * ZINF_PAGE, ZINF_PAGE);
}

#endif

uint32_t zinf_crc32c(uint32_t crc, const void *data, size_t length)
{
    return zinf_crc32c_in_hardware() ? crc32c_by_instruction(crc, data, length)
                                     : zinf_crc32c_by_table(crc, data, length);
}

/* A bijection of 64 bits (splitmix64's last step), cut to 32: neighbours get unrelated seeds. */
static uint32_t seed_of(int64_t offset, uint64_t generation)
{
    uint64_t x = (uint64_t)offset / ZINF_PAGE + (generation << 32 | generation >> 32);
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
    x = (x ^ x >> 27) * 0x94d049bb133111eb;
    return (uint32_t)(x >> 32 ^ x);
}

/* The checksums of up to AT_A_TIME pages. 0 is not a checksum. */
static void some_pages(const char *data, size_t pages, int64_t offset, uint64_t generation, uint32_t *sums)
{
    for (size_t k = 0; k < pages; k++)
        sums[k] = seed_of(offset + (int64_t)(k * ZINF_PAGE), generation);
    if (zinf_crc32c_in_hardware() && by_folding)
        zinf_fold_pages(data, pages, sums);
    else if (pages == AT_A_TIME && zinf_crc32c_in_hardware())
        four_pages(data, sums);
    else
        for (size_t k = 0; k < pages; k++)
            sums[k] = zinf_crc32c(sums[k], data + k * ZINF_PAGE, ZINF_PAGE);
    for (size_t k = 0; k < pages; k++)
        sums[k] = sums[k] ? sums[k] : 1;
}

void zinf_page_sums(const void *data, size_t length, int64_t offset, uint64_t generation, uint32_t *sums)
{
    size_t pages = length / ZINF_PAGE;
    for (size_t i = 0; i < pages; i += AT_A_TIME) {
        size_t n = pages - i < AT_A_TIME ? pages - i : AT_A_TIME;
        some_pages((const char *)data + i * ZINF_PAGE, n, offset + (int64_t)(i * ZINF_PAGE), generation, sums + i);
    }
}

size_t zinf_pages_intact(const void *data, size_t length, int64_t offset, uint64_t generation, const uint32_t *sums)
{
    for (size_t i = 0; i < length; i += AT_A_TIME * ZINF_PAGE, sums += AT_A_TIME) {
        uint32_t found[AT_A_TIME];
        size_t n = length - i < AT_A_TIME * ZINF_PAGE ? length - i : AT_A_TIME * ZINF_PAGE;
        zinf_page_sums((const char *)data + i, n, offset + (int64_t)i, generation, found);
        for (size_t k = 0; k < n / ZINF_PAGE; k++)
            if (sums[k] && sums[k] != found[k])
                return i + k * ZINF_PAGE;
    }
    return length;
}

/* A page's checksum is that of its content, and what its seed becomes behind a page: so are those of data in two parts
 * put together. */
int zinf_joined_sums(const uint32_t *sums, size_t pages, int64_t offset, uint64_t generation, uint32_t *crc)
{
    uint32_t joined = *crc;
    pthread_once(&once, prepare);
    for (size_t i = 0; i < pages; i++) {
        if (sums[i] <= 1)
            return -ENODATA;
        joined ^= seed_of(offset + (int64_t)(i * ZINF_PAGE), generation);
        joined = page_behind[0][joined & 255] ^ page_behind[1][joined >> 8 & 255] ^
                 page_behind[2][joined >> 16 & 255] ^ page_behind[3][joined >> 24] ^ sums[i];
    }
    *crc = joined;
    return 0;
}

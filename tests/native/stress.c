/* Many threads on one engine, with faults of every transient kind, for the sanitizers: stress PROVIDER FILE SECONDS. */
#define _GNU_SOURCE
#include "check.h"
#include "engine.h"
#include "faults.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { THREADS = 4, PAGE = 4096, REGION = 64 * PAGE, AT_A_TIME = 4 };

static zinf_engine *engine;
static zinf_file *file;
static time_t end;

static zinf_request *submit(int operation, char *memory, int64_t offset, size_t length, uint32_t *sums)
{
    zinf_request *request;
    CHECK(zinf_submit(file, operation, memory, offset, length, sums, 7, &request) == 0);
    return request;
}

static void wait_for(zinf_request *request, unsigned *seed)
{
    zinf_outcome outcome;
    int64_t timeout = rand_r(seed) % 2 ? -1 : 100000;
    while (zinf_wait(request, timeout) == -ETIMEDOUT)
        ;
    CHECK(zinf_done(request));
    zinf_result(request, &outcome);
    CHECK(outcome.error == 0);
    zinf_release(request);
}

/* Writes and reads back pieces of its own region of the file, a few at a time, every other one with checksums. */
static void *work(void *argument)
{
    unsigned seed = (unsigned)(size_t)argument;
    int64_t base = (int64_t)(seed - 1) * AT_A_TIME * REGION;
    char *out, *in;
    CHECK(posix_memalign((void **)&out, PAGE, AT_A_TIME * REGION) == 0);
    CHECK(posix_memalign((void **)&in, PAGE, AT_A_TIME * REGION) == 0);
    while (time(NULL) < end) {
        zinf_request *requests[AT_A_TIME];
        size_t lengths[AT_A_TIME];
        uint32_t sums[AT_A_TIME][REGION / PAGE];
        for (int i = 0; i < AT_A_TIME; i++) {
            lengths[i] = (size_t)(1 + rand_r(&seed) % (REGION / PAGE)) * PAGE;
            memset(out + i * REGION, rand_r(&seed), lengths[i]);
            requests[i] =
                submit(ZINF_WRITE, out + i * REGION, base + i * REGION, lengths[i], i % 2 ? sums[i] : NULL);
        }
        for (int i = AT_A_TIME - 1; i >= 0; i--)
            wait_for(requests[i], &seed);
        for (int i = 0; i < AT_A_TIME; i++)
            requests[i] = submit(ZINF_READ, in + i * REGION, base + i * REGION, lengths[i], i % 2 ? sums[i] : NULL);
        for (int i = 0; i < AT_A_TIME; i++) {
            wait_for(requests[i], &seed);
            CHECK(memcmp(out + i * REGION, in + i * REGION, lengths[i]) == 0);
        }
    }
    free(out);
    free(in);
    return NULL;
}

/* Keeps faults coming that a transfer must survive. */
static void *disturb(void *argument)
{
    static const zinf_fault faults[] = {
        {.stage = ZINF_SUBMISSION, .operation = ZINF_ANY, .nth = 3, .count = 2, .error = EAGAIN},
        {.stage = ZINF_SUBMISSION, .operation = ZINF_WRITE, .nth = 1, .count = 1, .error = EINTR},
        {.stage = ZINF_SUBMISSION, .operation = ZINF_ANY, .nth = 2, .count = 5, .length = PAGE},
        {.stage = ZINF_SUBMISSION, .operation = ZINF_ANY, .nth = 2, .count = 1},
        {.stage = ZINF_SUBMISSION, .operation = ZINF_READ, .nth = 2, .count = 2, .delay_ns = 1000000},
        {.stage = ZINF_COMPLETION, .operation = ZINF_READ, .nth = 4, .count = 1, .error = EAGAIN},
        {.stage = ZINF_COMPLETION, .operation = ZINF_ANY, .nth = 3, .count = 2, .length = PAGE},
        {.stage = ZINF_COMPLETION, .operation = ZINF_ANY, .nth = 1, .count = 3, .delay_ns = 2000000},
    };
    (void)argument;
    for (unsigned turn = 0; time(NULL) < end; turn++) {
        zinf_counters counters;
        CHECK(zinf_faults_inject(engine, &faults[turn % (sizeof faults / sizeof *faults)]) == 0);
        nanosleep(&(struct timespec){.tv_nsec = 3000000}, NULL);
        zinf_engine_counters(engine, &counters);
        if (turn % 8 == 7)
            CHECK(zinf_faults_inject(engine, NULL) == 0);
    }
    CHECK(zinf_faults_inject(engine, NULL) == 0);
    return NULL;
}

/* What was changed behind the engine's back is found, and the page is named. */
static void find_flipped_byte(int fd, char *memory)
{
    uint32_t sums[REGION / PAGE] = {0};
    unsigned seed = 1;
    zinf_outcome outcome;
    memset(memory, 5, REGION);
    wait_for(submit(ZINF_WRITE, memory, 0, REGION, sums), &seed);
    memory[9 * PAGE + 17] = 6;
    CHECK(pwrite(fd, memory + 9 * PAGE, PAGE, 9 * PAGE) == PAGE);
    zinf_request *request = submit(ZINF_READ, memory, 0, REGION, sums);
    CHECK(zinf_wait(request, -1) == 0);
    zinf_result(request, &outcome);
    CHECK(outcome.error == EBADMSG && outcome.offset == 9 * PAGE && outcome.length == PAGE);
    zinf_release(request);
}

/* A file that failed, with a long queue, must not hold up the end. */
static void close_while_poisoned(char *memory)
{
    const zinf_fault fault = {.stage = ZINF_COMPLETION, .operation = ZINF_READ, .nth = 2, .count = 1, .error = EIO};
    enum { MANY = 64 };
    zinf_request *requests[MANY];
    zinf_counters counters;
    CHECK(zinf_faults_inject(engine, &fault) == 0);
    for (int i = 0; i < MANY; i++)
        requests[i] = submit(ZINF_READ, memory + i * PAGE, 0, PAGE, NULL);
    CHECK(zinf_engine_close(engine, &counters) == 0);
    CHECK(zinf_file_detach(file, -1) == 0);
    int failed = 0;
    for (int i = 0; i < MANY; i++) {
        zinf_outcome outcome;
        CHECK(zinf_wait(requests[i], -1) == 0);
        zinf_result(requests[i], &outcome);
        failed += outcome.error == EIO;
        zinf_release(requests[i]);
    }
    CHECK(failed >= 1);
}

int main(int count, char **arguments)
{
    pthread_t threads[THREADS], disturber;
    char *memory;
    CHECK(count == 4);
    int direct = zinf_provider_is_direct(arguments[1]);
    CHECK(direct >= 0);
    int fd = open(arguments[2], O_RDWR | O_CREAT | (direct ? O_DIRECT : 0), 0600);
    CHECK(fd >= 0);
    zinf_faults_install();
    CHECK(zinf_engine_open(arguments[1], 8, 4 * PAGE, &engine) == 0);
    CHECK(zinf_file_attach(engine, fd, PAGE, &file) == 0);
    end = time(NULL) + atoi(arguments[3]);
    CHECK(pthread_create(&disturber, NULL, disturb, NULL) == 0);
    for (size_t i = 0; i < THREADS; i++)
        CHECK(pthread_create(&threads[i], NULL, work, (void *)(i + 1)) == 0);
    for (int i = 0; i < THREADS; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    CHECK(pthread_join(disturber, NULL) == 0);
    CHECK(posix_memalign((void **)&memory, PAGE, REGION) == 0);
    find_flipped_byte(fd, memory);
    close_while_poisoned(memory);
    free(memory);
    CHECK(close(fd) == 0);
    return 0;
}

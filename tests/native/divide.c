/* Work that several callers divide among threads at the same time, for the sanitizers: every unit is done once, and not
 * all of it by who asks. */
#include "threads.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { CALLERS = 4, UNITS = 100, TIMES = 300, VALUES = 1 << 20 };

static atomic_uint by_others;
static _Thread_local int asks;

static void count(void *work, size_t first, size_t behind)
{
    unsigned char *done = work;
    for (size_t unit = first; unit < behind; unit++)
        done[unit]++;
    by_others += !asks;
}

static void *call(void *argument)
{
    asks = 1;
    for (unsigned time = 0; time < TIMES; time++) {
        unsigned char done[UNITS] = {0}, once[UNITS];
        size_t units = (time + (size_t)argument) % UNITS + 1;
        memset(once, 1, sizeof once);
        zinf_divide(count, done, units, VALUES, 1 + time % 8);
        if (memcmp(done, once, units)) {
            fprintf(stderr, "a unit of %zu was not done once\n", units);
            exit(1);
        }
    }
    return NULL;
}

int main(void)
{
    pthread_t callers[CALLERS];
    for (size_t i = 0; i < CALLERS; i++)
        if (pthread_create(&callers[i], NULL, call, (void *)i))
            return 2;
    for (int i = 0; i < CALLERS; i++)
        pthread_join(callers[i], NULL);
    if (!by_others) {
        fprintf(stderr, "no thread helped\n");
        return 1;
    }
    return 0;
}

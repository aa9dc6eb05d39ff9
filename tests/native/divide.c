/* Work that several callers divide among threads at the same time, for the sanitizers: every unit is done once, and two
 * threads do two units at the same time. */
#include "threads.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { CALLERS = 4, UNITS = 100, TIMES = 300, VALUES = 1 << 20 };

static void count(void *work, size_t first, size_t behind)
{
    unsigned char *done = work;
    for (size_t unit = first; unit < behind; unit++)
        done[unit]++;
}

static void *call(void *argument)
{
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

/* Each of two units waits for the other one to begin. */
static void meet(void *work, size_t first, size_t behind)
{
    atomic_uint *begun = work;
    *begun += behind - first;
    for (unsigned slept = 0; *begun < 2 || behind - first > 1; slept++) {
        if (slept == 10000) {
            fprintf(stderr, "no thread helped\n");
            exit(1);
        }
        usleep(1000);
    }
}

int main(void)
{
    pthread_t callers[CALLERS];
    for (size_t i = 0; i < CALLERS; i++)
        if (pthread_create(&callers[i], NULL, call, (void *)i))
            return 2;
    for (int i = 0; i < CALLERS; i++)
        pthread_join(callers[i], NULL);
    atomic_uint begun = 0;
    zinf_divide(meet, &begun, 2, VALUES, 2);
    return 0;
}

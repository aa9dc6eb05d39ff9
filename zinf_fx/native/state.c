/* The clock, waking, and the engine's last owner. */
#include "state.h"

#include <errno.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

int64_t zinf_now_ns(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

void zinf_cond_init(pthread_cond_t *cond)
{
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(cond, &attributes);
    pthread_condattr_destroy(&attributes);
}

/* The counter can't overflow, so that the write can neither fail nor block. */
void zinf_wake(int wake)
{
    uint64_t one = 1;
    while (write(wake, &one, sizeof one) < 0 && errno == EINTR)
        ;
}

void zinf_engine_unref(zinf_engine *engine)
{
    if (atomic_fetch_sub(&engine->references, 1) > 1)
        return;
    pthread_mutex_destroy(&engine->mutex);
    free(engine);
}

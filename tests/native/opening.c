/* Each of the calls below that opening an engine makes fails once, for the sanitizers: opening PROVIDER. The linker puts
 * __wrap_NAME in place of NAME, and gives the original the name __real_NAME; libaio's own calls it doesn't reach. */
#include "check.h"
#include "engine.h"

#include <errno.h>
#include <glob.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>

static int calls, nth, failed; /* the error of the nth call */

void *__real_calloc(size_t count, size_t size);
int __real_eventfd(unsigned value, int flags);
int __real_pthread_create(pthread_t *thread, const pthread_attr_t *how, void *(*run)(void *), void *argument);
long __real_syscall(long number, long a, long b, long c, long d, long e);

static bool fails(int error)
{
    if (++calls != nth)
        return false;
    errno = failed = error;
    return true;
}

void *__wrap_calloc(size_t count, size_t size)
{
    return fails(ENOMEM) ? NULL : __real_calloc(count, size);
}

int __wrap_eventfd(unsigned value, int flags)
{
    return fails(EMFILE) ? -1 : __real_eventfd(value, flags);
}

int __wrap_pthread_create(pthread_t *thread, const pthread_attr_t *how, void *(*run)(void *), void *argument)
{
    return fails(EAGAIN) ? EAGAIN : __real_pthread_create(thread, how, run, argument);
}

long __wrap_syscall(long number, long a, long b, long c, long d, long e)
{
    return number == SYS_io_setup && fails(EPERM) ? -1 : __real_syscall(number, a, b, c, d, e);
}

static size_t open_files(void)
{
    glob_t found;
    CHECK(glob("/proc/self/fd/*", 0, NULL, &found) == 0);
    size_t count = found.gl_pathc;
    globfree(&found);
    return count;
}

int main(int count, char **arguments)
{
    zinf_engine *engine;
    zinf_counters counters;
    CHECK(count == 2);
    size_t before = open_files();
    for (nth = 1;; nth++) {
        calls = failed = 0;
        int error = zinf_engine_open(arguments[1], 3, 4096, &engine);
        CHECK(error == -failed);
        if (!error)
            break;
        CHECK(open_files() == before);
    }
    CHECK(nth > 7);
    CHECK(zinf_engine_close(engine, &counters) == 0);
    CHECK(open_files() == before);
    return 0;
}

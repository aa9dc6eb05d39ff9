/* Engines: opening, closing, counters. The work is in io_thread.c, what users hold in requests.c. */
#define _GNU_SOURCE
#include "state.h"

#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/stat.h>
#include <unistd.h>

const struct zinf_provider *zinf_providers[ZINF_PROVIDERS] = {
    &zinf_provider_libaio,
    &zinf_provider_aio,
    &zinf_provider_threads,
    &zinf_provider_buffered,
};

const char *zinf_provider_name(int index)
{
    return index >= 0 && index < ZINF_PROVIDERS ? zinf_providers[index]->name : NULL;
}

static const struct zinf_provider *find_provider(const char *name)
{
    for (int i = 0; i < ZINF_PROVIDERS; i++)
        if (!strcmp(zinf_providers[i]->name, name))
            return zinf_providers[i];
    return NULL;
}

int zinf_provider_is_direct(const char *name)
{
    const struct zinf_provider *provider = find_provider(name);
    return provider ? provider->direct : -EINVAL;
}

/* The provider and the thread. Signals are the caller's business: no thread of the engine takes one. */
static int start(zinf_engine *engine, unsigned depth)
{
    sigset_t all, before;
    sigfillset(&all);
    int error = -pthread_sigmask(SIG_SETMASK, &all, &before);
    if (error)
        return error;
    error = engine->provider->open(engine->provider, depth, engine->most, engine->wake, &engine->context);
    if (!error) {
        error = -pthread_create(&engine->thread, NULL, zinf_io_thread, engine);
        if (error)
            engine->provider->close(engine->context);
        else
            pthread_setname_np(engine->thread, "zinf-io");
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    return error;
}

int zinf_engine_open(const char *name, unsigned depth, size_t block_bytes, zinf_engine **out)
{
    const struct zinf_provider *provider = find_provider(name);
    if (!provider || depth < 1 || depth > ZINF_MAX_DEPTH || !block_bytes || block_bytes % ZINF_PAGE)
        return -EINVAL;
    unsigned most = depth > ZINF_MOST ? depth : ZINF_MOST;
    unsigned slots = 2 * most; /* as many again may wait for their checksums */
    zinf_engine *engine = calloc(1, sizeof *engine + slots * sizeof *engine->slots);
    if (!engine)
        return -ENOMEM;
    TAILQ_INIT(&engine->queue);
    engine->provider = provider;
    engine->most = most;
    engine->block_bytes = block_bytes;
    engine->bytes_limit = depth * block_bytes;
    engine->slot_count = slots;
    engine->process = getpid();
    atomic_init(&engine->references, 1);
    pthread_mutex_init(&engine->mutex, NULL);
    engine->wake = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    int error = engine->wake < 0 ? -errno : start(engine, depth);
    if (error) {
        if (engine->wake >= 0)
            close(engine->wake);
        zinf_engine_unref(engine);
        return error;
    }
    *out = engine;
    return 0;
}

int zinf_engine_close(zinf_engine *engine, zinf_counters *last)
{
    if (engine->process != getpid())
        return -ECHILD;
    pthread_mutex_lock(&engine->mutex);
    engine->stopping = true;
    zinf_wake(engine->wake);
    pthread_mutex_unlock(&engine->mutex);
    int error = -pthread_join(engine->thread, NULL);
    if (error)
        return error;
    engine->provider->close(engine->context);
    close(engine->wake);
    zinf_engine_counters(engine, last);
    zinf_engine_unref(engine);
    return 0;
}

void zinf_engine_counters(zinf_engine *engine, zinf_counters *out)
{
    pthread_mutex_lock(&engine->mutex);
    *out = engine->counters;
    pthread_mutex_unlock(&engine->mutex);
}

int64_t zinf_alignment(int fd)
{
    int64_t memory = ZINF_PAGE, offset = ZINF_PAGE;
#ifdef STATX_DIOALIGN
    struct statx answer;
    if (statx(fd, "", AT_EMPTY_PATH, STATX_DIOALIGN, &answer) < 0)
        return -errno;
    if (answer.stx_mask & STATX_DIOALIGN) {
        memory = answer.stx_dio_mem_align;
        offset = answer.stx_dio_offset_align;
    }
#else
    (void)fd;
#endif
    if (!memory || !offset)
        return 0;
    int64_t larger = memory > offset ? memory : offset;
    return larger > ZINF_PAGE ? larger : ZINF_PAGE;
}

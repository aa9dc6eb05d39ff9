/* Kernel AIO, through libaio where it is installed, and by the same system calls where it is not.
 *
 * libaio is bound at run time, so that neither building nor installing needs it. Its functions return negated errnos,
 * the system calls set errno; both speak the kernel's own structures.
 */
#include "provider.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

struct calls {
    int (*setup)(int depth, aio_context_t *context);
    int (*submit)(aio_context_t context, long count, struct iocb **controls);
    int (*getevents)(aio_context_t context, long min, long max, struct io_event *events, struct timespec *timeout);
    int (*destroy)(aio_context_t context);
};

struct aio {
    struct calls calls;
    void *library;
    aio_context_t kernel;
    int wake;
    unsigned most;
    unsigned flying;        /* blocks that the kernel has */
    struct iocb **controls; /* `most` of each */
    struct io_event *events;
};

static int direct_setup(int depth, aio_context_t *context)
{
    return syscall(SYS_io_setup, depth, context) < 0 ? -errno : 0;
}

static int direct_submit(aio_context_t context, long count, struct iocb **controls)
{
    long taken = syscall(SYS_io_submit, context, count, controls);
    return taken < 0 ? -errno : (int)taken;
}

static int direct_getevents(aio_context_t context, long min, long max, struct io_event *events,
                            struct timespec *timeout)
{
    long count = syscall(SYS_io_getevents, context, min, max, events, timeout);
    return count < 0 ? -errno : (int)count;
}

static int direct_destroy(aio_context_t context)
{
    return syscall(SYS_io_destroy, context) < 0 ? -errno : 0;
}

static const struct calls system_calls = {direct_setup, direct_submit, direct_getevents, direct_destroy};

static int bind_libaio(struct aio *aio)
{
    static const char *const libraries[] = {"libaio.so.1t64", "libaio.so.1"};
    static const char *const names[] = {"io_setup", "io_submit", "io_getevents", "io_destroy"}; /* as in `calls` */
    /* ISO C has no cast from an object pointer to a function pointer; POSIX promises that the bits are the same. */
    union {
        void *symbols[4];
        struct calls calls;
    } bound;
    for (size_t i = 0; i < 2 && !aio->library; i++)
        aio->library = dlopen(libraries[i], RTLD_NOW | RTLD_LOCAL);
    for (size_t i = 0; i < 4; i++)
        if (!aio->library || !(bound.symbols[i] = dlsym(aio->library, names[i])))
            return -ENOSYS;
    aio->calls = bound.calls;
    return 0;
}

/* The kernel gives a context up only after a grace period, tens of milliseconds: those of engines that were closed wait
 * here for the next ones of this process. A forked child has none of them. */
static struct {
    pthread_mutex_t mutex;
    unsigned count;
    struct {
        aio_context_t kernel;
        unsigned most;
    } contexts[4];
} idle = {.mutex = PTHREAD_MUTEX_INITIALIZER};

static void forget_idle(void)
{
    pthread_mutex_init(&idle.mutex, NULL); /* another thread may have had it */
    idle.count = 0;
}

__attribute__((constructor)) static void forget_idle_in_children(void)
{
    pthread_atfork(NULL, NULL, forget_idle);
}

/* Whether there is one for so many blocks. */
static bool take_idle(unsigned most, aio_context_t *kernel)
{
    bool found = false;
    pthread_mutex_lock(&idle.mutex);
    for (unsigned i = 0; i < idle.count && !found; i++)
        if (idle.contexts[i].most == most) {
            found = true;
            *kernel = idle.contexts[i].kernel;
            idle.contexts[i] = idle.contexts[--idle.count];
        }
    pthread_mutex_unlock(&idle.mutex);
    return found;
}

/* Whether there was room for it. */
static bool keep_idle(unsigned most, aio_context_t kernel)
{
    pthread_mutex_lock(&idle.mutex);
    bool kept = idle.count < sizeof idle.contexts / sizeof *idle.contexts;
    if (kept) {
        idle.contexts[idle.count].kernel = kernel;
        idle.contexts[idle.count++].most = most;
    }
    pthread_mutex_unlock(&idle.mutex);
    return kept;
}

static void aio_free(struct aio *aio)
{
    if (aio->library)
        dlclose(aio->library);
    free(aio->controls);
    free(aio->events);
    free(aio);
}

static int aio_open(const struct zinf_provider *self, unsigned depth, unsigned most, int wake, void **context)
{
    (void)depth;
    struct aio *aio = calloc(1, sizeof *aio);
    if (!aio)
        return -ENOMEM;
    aio->wake = wake;
    aio->most = most;
    aio->calls = system_calls;
    aio->controls = calloc(most, sizeof *aio->controls);
    aio->events = calloc(most, sizeof *aio->events);
    int error = aio->controls && aio->events ? 0 : -ENOMEM;
    if (!error && self == &zinf_provider_libaio)
        error = bind_libaio(aio);
    if (!error && !take_idle(most, &aio->kernel))
        error = aio->calls.setup((int)most, &aio->kernel);
    if (error) {
        aio_free(aio);
        return error;
    }
    *context = aio;
    return 0;
}

static int aio_submit(void *context, struct zinf_block **blocks, unsigned count)
{
    struct aio *aio = context;
    if (count > aio->most)
        count = aio->most;
    for (unsigned i = 0; i < count; i++) {
        struct zinf_block *block = blocks[i];
        bool merged = block->count > 1;
        block->control = (struct iocb){
            .aio_data = (uintptr_t)block,
            .aio_lio_opcode = block->operation ? (merged ? IOCB_CMD_PWRITEV : IOCB_CMD_PWRITE)
                                               : (merged ? IOCB_CMD_PREADV : IOCB_CMD_PREAD),
            .aio_fildes = (uint32_t)block->fd,
            .aio_buf = merged ? (uintptr_t)block->parts : (uintptr_t)block->address,
            .aio_nbytes = merged ? block->count : block->length,
            .aio_offset = block->offset,
            .aio_flags = IOCB_FLAG_RESFD,
            .aio_resfd = (uint32_t)aio->wake,
        };
        aio->controls[i] = &block->control;
    }
    int taken = aio->calls.submit(aio->kernel, count, aio->controls);
    aio->flying += taken > 0 ? (unsigned)taken : 0;
    return taken ? taken : -EAGAIN;
}

static int aio_reap(void *context, struct zinf_block **blocks, unsigned max)
{
    struct aio *aio = context;
    struct timespec now = {0, 0};
    if (max > aio->most)
        max = aio->most;
    int count = aio->calls.getevents(aio->kernel, 0, max, aio->events, &now);
    for (int i = 0; i < count; i++) {
        blocks[i] = (struct zinf_block *)(uintptr_t)aio->events[i].data;
        blocks[i]->result = aio->events[i].res;
    }
    aio->flying -= count > 0 ? (unsigned)count : 0;
    return count == -EINTR ? 0 : count;
}

static void aio_close(void *context)
{
    struct aio *aio = context;
    /* Destroying it waits for what the kernel still has, which the next engine must not be told of. */
    if (aio->flying || !keep_idle(aio->most, aio->kernel))
        aio->calls.destroy(aio->kernel); /* fails only for a context that doesn't exist */
    aio_free(aio);
}

const struct zinf_provider zinf_provider_libaio = {"libaio", true, aio_open, aio_submit, aio_reap, aio_close};
const struct zinf_provider zinf_provider_aio = {"aio", true, aio_open, aio_submit, aio_reap, aio_close};

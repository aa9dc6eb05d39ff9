/* What moves the bytes: the table of operations that every provider fills in, and the block that they work on.
 *
 * All operations are called by the engine's I/O thread, except open and close.
 */
#ifndef ZINF_PROVIDER_H
#define ZINF_PROVIDER_H

#include <linux/aio_abi.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/queue.h>
#include <sys/uio.h>

/* One transfer, small enough for one system call. */
struct zinf_block {
    int operation;
    int fd;
    void *address;
    int64_t offset;
    size_t length;
    struct iovec *parts;     /* count > 1: memory of the transfer, in place of address and length */
    unsigned count;
    int64_t result;          /* by the provider: bytes moved, or a negated errno */
    struct iocb control;     /* kernel AIO's own */
    STAILQ_ENTRY(zinf_block) next; /* the thread pool's own */
};

struct zinf_provider {
    const char *name;
    bool direct; /* files are opened with O_DIRECT */

    /* For `most` blocks under way, of which `depth` are large. Every completion adds to the eventfd `wake`. 0, or a
     * negated errno with nothing left behind. */
    int (*open)(const struct zinf_provider *self, unsigned depth, unsigned most, int wake, void **context);

    /* The number of blocks taken, from the first on (at least 1), or the negated errno of the first. */
    int (*submit)(void *context, struct zinf_block **blocks, unsigned count);

    /* Takes up to `max` finished blocks, without waiting. Their number, or a negated errno. */
    int (*reap)(void *context, struct zinf_block **blocks, unsigned max);

    /* After the last block was reaped. */
    void (*close)(void *context);
};

extern const struct zinf_provider zinf_provider_libaio;
extern const struct zinf_provider zinf_provider_aio;
extern const struct zinf_provider zinf_provider_threads;
extern const struct zinf_provider zinf_provider_buffered;

enum { ZINF_PROVIDERS = 4 };

/* Those that an engine can be opened on, best first. Tests put in their places others that call them and fail at will. */
extern const struct zinf_provider *zinf_providers[ZINF_PROVIDERS];

/* Wakes the I/O thread, now or out of its next sleep. */
void zinf_wake(int wake);

#endif

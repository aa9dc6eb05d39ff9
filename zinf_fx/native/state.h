/* What the parts of the engine share.
 *
 * [Note: who owns what]  The engine's mutex guards the queue of requests, every request, every file, and the counters.
 * The slots, one per block that was cut, belong to the I/O thread alone, and so does the provider's context.
 * The mutex is never held across a system call that does I/O.
 */
#ifndef ZINF_STATE_H
#define ZINF_STATE_H

#include "checksum.h"
#include "engine.h"
#include "provider.h"

#include <pthread.h>
#include <stdatomic.h>
#include <sys/queue.h>
#include <sys/types.h>

enum {
    ZINF_MAX_DEPTH = 256,
    ZINF_MOST = 128,  /* blocks under way where they are small; `depth` if that is more */
    ZINF_MERGED = 32, /* blocks in one transfer, at most */
};

struct zinf_file {
    zinf_engine *engine;
    int fd;
    size_t alignment;
    bool poisoned;
    unsigned requests; /* not done yet */
    pthread_cond_t unused;
};

struct zinf_request {
    zinf_engine *engine;
    zinf_file *file; /* NULL once done */
    int operation;
    char *address; /* this and the next three: the part not yet cut into blocks */
    int64_t offset;
    size_t length;
    uint32_t *sums; /* of the page at `offset`; NULL: none */
    uint64_t generation;
    unsigned blocks; /* under way */
    zinf_outcome outcome; /* began_ns: when the first block was cut; 0: none was */
    atomic_int done;
    atomic_int references; /* the engine's, until done, and the ticket's */
    pthread_cond_t finished;
    TAILQ_ENTRY(zinf_request) neighbours; /* in the queue, while length > 0 */
    bool queued;
};

/* A write goes from SUMMING over READY to FLYING, a read from READY over FLYING to CHECKING; without checksums, only
 * READY and FLYING are left. */
enum slot_state { FREE, SUMMING, READY, FLYING, CHECKING };

struct slot {
    struct zinf_block block; /* first: a provider's block is its slot. What is asked for in this attempt */
    size_t length;           /* what is left of the block */
    size_t flying;           /* bytes that count against the engine's limit, while FLYING */
    zinf_request *request;
    struct slot *mate;       /* the next block of the same transfer: [Note: merging] */
    size_t transfer;         /* in a transfer's first block: its bytes, and the memory of its blocks */
    struct iovec parts[ZINF_MERGED];
    enum slot_state state;
    bool alone; /* in no transfer with others */
    int retries;
    int64_t due;    /* READY: not to be submitted before */
    size_t whole;   /* bytes of the block, and its checksums; NULL: none */
    uint32_t *sums;
};

struct zinf_engine {
    pthread_mutex_t mutex;
    pthread_t thread;
    pid_t process;
    const struct zinf_provider *provider;
    void *context;
    int wake;
    unsigned most;      /* blocks under way */
    size_t block_bytes;
    size_t bytes_limit; /* under way */
    atomic_int references; /* the opener's, and one per request and file */
    bool stopping;
    TAILQ_HEAD(zinf_requests, zinf_request) queue; /* the requests with bytes that no block covers yet */
    zinf_counters counters;
    unsigned under_way[2];
    int64_t since[2];
    bool sleeping;        /* the I/O thread has to be woken for new requests */
    uint64_t submissions; /* so far */
    uint64_t seen;        /* of them, when the I/O thread last looked at the queue */

    /* From here on the I/O thread's. */
    unsigned used;       /* slots that aren't FREE */
    unsigned cut;        /* slots that are neither FREE nor CHECKING, and their bytes */
    size_t cut_bytes;
    unsigned flying;     /* slots that are FLYING, and their bytes */
    size_t flying_bytes;
    unsigned slot_count;
    unsigned next_slot;  /* the slot after the one that was filled last */
    struct slot slots[];
};

int64_t zinf_now_ns(void);

/* A condition whose time limits are in the clock of zinf_now_ns. */
void zinf_cond_init(pthread_cond_t *cond);

void zinf_engine_unref(zinf_engine *engine);

/* Takes a request out of the queue. This and the next two under the mutex. */
void zinf_dequeue(zinf_engine *engine, zinf_request *request);

/* Notes an error of a request, of several that with the lowest offset, and gives up what of it is still queued. EIO
 * poisons its file. */
void zinf_request_fail(zinf_request *request, int error, int64_t offset, size_t length);

/* Wakes who waits for the request if no part of it is left. It may be gone afterwards. */
void zinf_request_finish(zinf_request *request);

/* The I/O thread: the argument is the engine. Ends when the engine is stopping and nothing is left. */
void *zinf_io_thread(void *engine);

#endif

/* The providers that fail at will: each passes what its engine asks for to one of the engine's own, and spoils some of it.
 * A block whose submission or completion is delayed stays here meanwhile; for the engine it is under way. */
#include "faults.h"

#include "state.h"

#include <errno.h>
#include <stdlib.h>
#include <time.h>

enum { MAX_FAULTS = 16, LOOK_EVERY_NS = 100000 };

struct wrapper {
    struct zinf_provider table; /* first: an engine's provider is its wrapper */
    const struct zinf_provider *inner;
};

struct late {
    struct zinf_block *block;
    int64_t due;
    bool submitted;
};

struct faulty {
    const struct zinf_provider *inner;
    void *context;
    int wake;
    unsigned late_count; /* this and the next: the I/O thread's */
    struct late late[ZINF_MAX_DEPTH];
    atomic_ullong fired;
    pthread_mutex_t mutex; /* guards the next two */
    unsigned armed;
    struct {
        zinf_fault fault;
        int64_t seen; /* blocks, since it was armed */
    } faults[MAX_FAULTS];
};

static atomic_llong set_up_calls;
static atomic_llong set_up_nth;
static atomic_int set_up_error;

int64_t zinf_faults_set_up(int64_t nth, int error)
{
    int64_t calls = atomic_exchange(&set_up_calls, 0);
    atomic_store(&set_up_error, error);
    atomic_store(&set_up_nth, nth);
    return calls;
}

static int set_up(void)
{
    long long call = atomic_fetch_add(&set_up_calls, 1) + 1;
    return call == atomic_load(&set_up_nth) ? -atomic_load(&set_up_error) : 0;
}

static bool concerns(const zinf_fault *fault, int stage, const struct zinf_block *block)
{
    return fault->stage == stage && (fault->operation == ZINF_ANY || fault->operation == block->operation);
}

/* Which block of the transfer is the first that a fault hits, from 0; block->count: none. This and the next under the
 * mutex. */
static unsigned first_hit(const struct faulty *faulty, int stage, const struct zinf_block *block, zinf_fault *out)
{
    unsigned first = block->count;
    for (unsigned i = 0; i < faulty->armed; i++) {
        const zinf_fault *fault = &faulty->faults[i].fault;
        int64_t ahead = fault->nth - 1 - faulty->faults[i].seen;
        bool spent = ahead + fault->count <= 0;
        ahead = ahead > 0 ? ahead : 0;
        if (concerns(fault, stage, block) && !spent && ahead < (int64_t)first) {
            first = (unsigned)ahead;
            *out = *fault;
        }
    }
    return first;
}

static void pass(struct faulty *faulty, int stage, const struct zinf_block *block, unsigned blocks)
{
    for (unsigned i = 0; i < faulty->armed; i++)
        if (concerns(&faulty->faults[i].fault, stage, block))
            faulty->faults[i].seen += blocks;
}

/* Whether a fault hits the transfer: which one, with the bytes that it leaves of the transfer as its length. One that is
 * only foreseen doesn't fire yet. */
static bool meets(struct faulty *faulty, int stage, const struct zinf_block *block, bool foreseen, zinf_fault *fault)
{
    pthread_mutex_lock(&faulty->mutex);
    unsigned passed = block->count, hit = first_hit(faulty, stage, block, fault);
    bool met = hit < block->count;
    if (met) {
        bool one_by_one = fault->error && fault->error != EIO && block->count > 1;
        if (fault->length)
            passed = hit + 1; /* those behind the cut come again */
        for (unsigned i = 0; fault->length && i < hit; i++)
            fault->length += block->parts[i].iov_len;
        if (one_by_one || foreseen)
            passed = 0;
        faulty->fired += passed > 0;
    }
    pass(faulty, stage, block, passed);
    pthread_mutex_unlock(&faulty->mutex);
    return met;
}

static void shorten(struct zinf_block *block, size_t length)
{
    unsigned count = 0;
    for (; count < block->count && length; count++) {
        struct iovec *part = &block->parts[count];
        part->iov_len = part->iov_len < length ? part->iov_len : length;
        length -= part->iov_len;
    }
    block->count = count;
    block->length = block->parts[0].iov_len;
}

static void hold(struct faulty *faulty, struct zinf_block *block, bool submitted, int64_t delay_ns)
{
    faulty->late[faulty->late_count++] = (struct late){block, zinf_now_ns() + delay_ns, submitted};
}

static int faulty_submit(void *context, struct zinf_block **blocks, unsigned count)
{
    struct faulty *faulty = context;
    zinf_fault fault = {0};
    unsigned clear = 0;
    while (clear < count && !meets(faulty, ZINF_SUBMISSION, blocks[clear], clear > 0, &fault))
        clear++;
    if (clear) /* the engine comes with the one that is to be hit at once */
        return faulty->inner->submit(faulty->context, blocks, clear);
    if (fault.error)
        return -fault.error;
    if (fault.delay_ns > 0) {
        hold(faulty, blocks[0], false, fault.delay_ns);
        return 1;
    }
    if (fault.length)
        shorten(blocks[0], fault.length);
    return faulty->inner->submit(faulty->context, blocks, 1);
}

/* What a fault makes of a completion. Whether it is held back. */
static bool spoil(struct faulty *faulty, struct zinf_block *block)
{
    zinf_fault fault;
    if (!meets(faulty, ZINF_COMPLETION, block, false, &fault))
        return false;
    if (fault.error)
        block->result = -fault.error;
    else if (fault.length && block->result > (int64_t)fault.length)
        block->result = (int64_t)fault.length;
    if (fault.delay_ns > 0)
        hold(faulty, block, true, fault.delay_ns);
    return fault.delay_ns > 0;
}

/* Whether the block is over: one whose submission was late may not be taken. */
static bool let_go(struct faulty *faulty, struct late late)
{
    int taken = late.submitted ? 0 : faulty->inner->submit(faulty->context, &late.block, 1);
    if (!late.submitted && taken < 1)
        late.block->result = taken ? taken : -EIO;
    return taken < 1;
}

static int faulty_reap(void *context, struct zinf_block **blocks, unsigned max)
{
    struct faulty *faulty = context;
    unsigned late_count = faulty->late_count, count = 0;
    int64_t now = zinf_now_ns();
    faulty->late_count = 0;
    for (unsigned i = 0; i < late_count; i++) {
        struct late late = faulty->late[i];
        if (late.due > now || count == max)
            faulty->late[faulty->late_count++] = late;
        else if (let_go(faulty, late))
            blocks[count++] = late.block;
    }
    int found = faulty->inner->reap(faulty->context, blocks + count, max - count);
    if (found < 0)
        return found;
    for (unsigned i = count, end = count + (unsigned)found; i < end; i++)
        if (!spoil(faulty, blocks[i]))
            blocks[count++] = blocks[i];
    if (faulty->late_count && !count) { /* nobody else would wake the engine when a late block is due */
        nanosleep(&(struct timespec){.tv_nsec = LOOK_EVERY_NS}, NULL);
        zinf_wake(faulty->wake);
    }
    return (int)count;
}

static void faulty_close(void *context)
{
    struct faulty *faulty = context;
    faulty->inner->close(faulty->context);
    pthread_mutex_destroy(&faulty->mutex);
    free(faulty);
}

static int faulty_open(const struct zinf_provider *self, unsigned depth, unsigned most, int wake, void **context)
{
    struct faulty *faulty = calloc(1, sizeof *faulty);
    if (!faulty)
        return -ENOMEM;
    faulty->inner = ((const struct wrapper *)self)->inner;
    faulty->wake = wake;
    pthread_mutex_init(&faulty->mutex, NULL);
    int error = set_up();
    if (!error)
        error = faulty->inner->open(faulty->inner, depth, most, wake, &faulty->context);
    if (error) {
        pthread_mutex_destroy(&faulty->mutex);
        free(faulty);
        return error;
    }
    error = set_up();
    if (error)
        faulty_close(faulty);
    else
        *context = faulty;
    return error;
}

void zinf_faults_install(void)
{
    static struct wrapper wrappers[ZINF_PROVIDERS];
    for (int i = 0; i < ZINF_PROVIDERS; i++) {
        const struct zinf_provider *inner = zinf_providers[i];
        wrappers[i].table = (struct zinf_provider){
            inner->name, inner->direct, faulty_open, faulty_submit, faulty_reap, faulty_close,
        };
        wrappers[i].inner = inner;
        zinf_providers[i] = &wrappers[i].table;
    }
}

int zinf_faults_inject(zinf_engine *engine, const zinf_fault *fault)
{
    struct faulty *faulty = engine->context;
    if (engine->provider->open != faulty_open)
        return -EINVAL;
    if (fault && (fault->nth < 1 || fault->count < 1 ||
                  (fault->stage != ZINF_SUBMISSION && fault->stage != ZINF_COMPLETION)))
        return -EINVAL;
    pthread_mutex_lock(&faulty->mutex);
    int error = fault && faulty->armed == MAX_FAULTS ? -ENOSPC : 0;
    if (!fault)
        faulty->armed = 0;
    else if (!error) {
        faulty->faults[faulty->armed].fault = *fault;
        faulty->faults[faulty->armed++].seen = 0;
    }
    pthread_mutex_unlock(&faulty->mutex);
    return error;
}

uint64_t zinf_faults_fired(zinf_engine *engine)
{
    return engine->provider->open == faulty_open ? ((struct faulty *)engine->context)->fired : 0;
}

/* A pool of threads in pread and pwrite: for systems without kernel AIO, and for files without direct I/O. */
#define _GNU_SOURCE
#include "provider.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/types.h>
#include <unistd.h>

STAILQ_HEAD(blocks, zinf_block);

struct pool {
    pthread_mutex_t mutex;
    pthread_cond_t work;
    struct blocks todo;
    struct blocks finished;
    bool stopping;
    bool buffered;
    int wake;
    unsigned workers;
    pthread_t threads[];
};

static struct zinf_block *first_of(struct blocks *list)
{
    struct zinf_block *block = STAILQ_FIRST(list);
    if (block)
        STAILQ_REMOVE_HEAD(list, next);
    return block;
}

static int64_t transfer(const struct zinf_block *block)
{
    struct iovec whole = {block->address, block->length};
    const struct iovec *parts = block->count > 1 ? block->parts : &whole;
    int count = block->count > 1 ? (int)block->count : 1;
    ssize_t moved = block->operation ? pwritev(block->fd, parts, count, block->offset)
                                     : preadv(block->fd, parts, count, block->offset);
    return moved < 0 ? -errno : moved;
}

/* A second copy in the page cache would take the host memory that a plan counts on: what was read is dropped there, and
 * what was written is sent to the device at once, so that it can be dropped. Both are advice, which may be refused. */
static void leave_the_cache(const struct zinf_block *block)
{
    if (block->operation)
        (void)sync_file_range(block->fd, block->offset, block->result, SYNC_FILE_RANGE_WRITE);
    (void)posix_fadvise(block->fd, block->offset, block->result, POSIX_FADV_DONTNEED);
}

static void *work(void *argument)
{
    struct pool *pool = argument;
    pthread_mutex_lock(&pool->mutex);
    for (;;) {
        struct zinf_block *block = first_of(&pool->todo);
        if (!block) {
            if (pool->stopping)
                break;
            pthread_cond_wait(&pool->work, &pool->mutex);
            continue;
        }
        pthread_mutex_unlock(&pool->mutex);
        block->result = transfer(block);
        if (pool->buffered && block->result > 0)
            leave_the_cache(block);
        pthread_mutex_lock(&pool->mutex);
        STAILQ_INSERT_TAIL(&pool->finished, block, next);
        zinf_wake(pool->wake);
    }
    pthread_mutex_unlock(&pool->mutex);
    return NULL;
}

static void pool_close(void *context)
{
    struct pool *pool = context;
    pthread_mutex_lock(&pool->mutex);
    pool->stopping = true;
    pthread_cond_broadcast(&pool->work);
    pthread_mutex_unlock(&pool->mutex);
    for (unsigned i = 0; i < pool->workers; i++)
        pthread_join(pool->threads[i], NULL);
    pthread_cond_destroy(&pool->work);
    pthread_mutex_destroy(&pool->mutex);
    free(pool);
}

/* The blocks beyond `depth` wait in the list. */
static int pool_open(const struct zinf_provider *self, unsigned depth, unsigned most, int wake, void **context)
{
    (void)most;
    struct pool *pool = calloc(1, sizeof *pool + depth * sizeof *pool->threads);
    if (!pool)
        return -ENOMEM;
    pthread_mutex_init(&pool->mutex, NULL);
    pthread_cond_init(&pool->work, NULL);
    STAILQ_INIT(&pool->todo);
    STAILQ_INIT(&pool->finished);
    pool->wake = wake;
    pool->buffered = !self->direct;
    while (pool->workers < depth) {
        int error = -pthread_create(&pool->threads[pool->workers], NULL, work, pool);
        if (error) {
            pool_close(pool);
            return error;
        }
        pool->workers++;
    }
    *context = pool;
    return 0;
}

static int pool_submit(void *context, struct zinf_block **blocks, unsigned count)
{
    struct pool *pool = context;
    pthread_mutex_lock(&pool->mutex);
    for (unsigned i = 0; i < count; i++) {
        STAILQ_INSERT_TAIL(&pool->todo, blocks[i], next);
        pthread_cond_signal(&pool->work);
    }
    pthread_mutex_unlock(&pool->mutex);
    return (int)count;
}

static int pool_reap(void *context, struct zinf_block **blocks, unsigned max)
{
    struct pool *pool = context;
    int count = 0;
    pthread_mutex_lock(&pool->mutex);
    while ((unsigned)count < max && (blocks[count] = first_of(&pool->finished)))
        count++;
    pthread_mutex_unlock(&pool->mutex);
    return count;
}

const struct zinf_provider zinf_provider_threads = {"threads", true, pool_open, pool_submit, pool_reap, pool_close};
const struct zinf_provider zinf_provider_buffered = {"buffered", false, pool_open, pool_submit, pool_reap, pool_close};

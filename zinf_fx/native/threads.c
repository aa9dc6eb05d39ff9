#define _GNU_SOURCE
#include "threads.h"

#include <fenv.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>

enum {
    MOST = 1024,             /* threads: MOST_THREADS in config.py */
    SHARES_EACH = 2,         /* of each thread */
    WORTH_A_SHARE = 1 << 15, /* values: about 0.01 ms of work, where waking a thread takes as long */
};

/* All under the mutex but what the share does. It is the caller's, who waits until none is left. */
struct job {
    zinf_share *share;
    void *work;
    size_t units, shares;
    size_t next, left; /* the first share that nobody does, and how many are not done */
    unsigned wanted;   /* threads that may still help */
    fenv_t environment; /* the caller's: whether subnormal numbers are flushed to zero */
    struct job *behind;
};

static struct {
    pthread_mutex_t mutex;
    pthread_cond_t work, done;
    struct job *first;
    unsigned count, idle; /* threads */
} pool = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, PTHREAD_COND_INITIALIZER, NULL, 0, 0};

static struct job **place_of(const struct job *job)
{
    struct job **place = &pool.first;
    while (*place && *place != job)
        place = &(*place)->behind;
    return place;
}

/* Under the mutex. A job without a share left to begin is in the pool's list no more. */
static void do_shares(struct job *job)
{
    while (job->next < job->shares) {
        size_t number = job->next++;
        if (job->next == job->shares)
            *place_of(job) = job->behind;
        pthread_mutex_unlock(&pool.mutex);
        job->share(job->work, job->units * number / job->shares, job->units * (number + 1) / job->shares);
        pthread_mutex_lock(&pool.mutex);
        if (!--job->left)
            pthread_cond_broadcast(&pool.done);
    }
}

static void *help(void *unused)
{
    (void)unused;
    pthread_mutex_lock(&pool.mutex);
    for (;;) {
        struct job *job = pool.first;
        while (job && !job->wanted)
            job = job->behind;
        if (job) {
            job->wanted--;
            fesetenv(&job->environment);
            do_shares(job);
        } else {
            pool.idle++;
            pthread_cond_wait(&pool.work, &pool.mutex);
            pool.idle--;
        }
    }
    return NULL;
}

/* The parent's threads are not there. */
static void after_fork(void)
{
    pthread_mutex_init(&pool.mutex, NULL);
    pthread_cond_init(&pool.work, NULL);
    pthread_cond_init(&pool.done, NULL);
    pool.first = NULL;
    pool.count = pool.idle = 0;
}

/* Under the mutex. Signals are the caller's business: none of these threads takes one. */
static void start_threads(unsigned count)
{
    static bool follows_forks;
    if (pool.count >= count || (!follows_forks && pthread_atfork(NULL, NULL, after_fork)))
        return;
    follows_forks = true;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_t thread;
    while (pool.count < count && !pthread_create(&thread, NULL, help, NULL)) {
        pthread_setname_np(thread, "zinf-values");
        pthread_detach(thread);
        pool.count++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

void zinf_divide(zinf_share *share, void *work, size_t units, size_t values, unsigned threads)
{
    size_t shares = values / WORTH_A_SHARE;
    threads = threads < MOST ? threads : MOST;
    shares = shares < units ? shares : units;
    if (threads < 2 || shares < 2) {
        share(work, 0, units);
        return;
    }
    threads = threads < shares ? threads : (unsigned)shares;
    shares = shares < SHARES_EACH * threads ? shares : SHARES_EACH * threads;
    struct job job = {.share = share, .work = work, .units = units, .shares = shares, .left = shares,
                      .wanted = threads - 1};
    fegetenv(&job.environment);
    pthread_mutex_lock(&pool.mutex);
    start_threads(threads - 1);
    *place_of(NULL) = &job;
    for (unsigned i = 0; i < job.wanted && i < pool.idle; i++)
        pthread_cond_signal(&pool.work);
    do_shares(&job);
    while (job.left)
        pthread_cond_wait(&pool.done, &pool.mutex);
    pthread_mutex_unlock(&pool.mutex);
}

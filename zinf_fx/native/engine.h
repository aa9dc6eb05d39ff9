/* Asynchronous file transfers: one I/O thread per engine, one ticket per request.
 *
 * A request is split into blocks. Blocks of at most depth * block_bytes bytes are with the operating system at a time
 * (many more than `depth` of them where they are small), and a finished one is replaced at once. Reads begin before the
 * writes that are waiting. Requests complete in any order; overlapping requests are not ordered with each other.
 *
 * Functions that can fail return 0 or a negated errno. No function but zinf_wait, zinf_file_detach and
 * zinf_engine_close blocks on I/O. A process made by fork can't use its parent's engine: it gets -ECHILD.
 */
#ifndef ZINF_ENGINE_H
#define ZINF_ENGINE_H

#include <stddef.h>
#include <stdint.h>

/* cdef begin: build.py hands the lines between these marks to cffi */

#define ZINF_READ 0
#define ZINF_WRITE 1

typedef struct zinf_engine zinf_engine;
typedef struct zinf_file zinf_file;
typedef struct zinf_request zinf_request;

/* How a request ended. `error` is 0 or a positive errno; offset (in the file) and length (bytes) are those of the piece
 * that failed; `poisoned` tells that nothing was tried, because an earlier EIO poisoned the file. ENODATA: the file
 * ended before the request did. EBADMSG: a page that was read doesn't have its checksum. When the I/O thread began with
 * it and when it was done: nanoseconds of CLOCK_MONOTONIC; the same twice for one that was given up before it began. */
typedef struct {
    int error;
    int poisoned;
    int64_t offset;
    uint64_t length;
    int64_t began_ns;
    int64_t ended_ns;
} zinf_outcome;

/* Bytes moved, and nanoseconds during which at least one block of that direction was under way; transfers that the
 * operating system was given; bytes summed or checked, and the nanoseconds that it took of the I/O thread. */
typedef struct {
    uint64_t bytes_read;
    uint64_t bytes_written;
    uint64_t read_ns;
    uint64_t write_ns;
    uint64_t transfers;
    uint64_t bytes_checked;
    uint64_t check_ns;
} zinf_counters;

/* The i-th provider's name, best first, or NULL past the last. */
const char *zinf_provider_name(int index);

/* 1 if the provider of that name expects files opened with O_DIRECT, 0 if not, -EINVAL if there is none. */
int zinf_provider_is_direct(const char *name);

/* Starts an engine on the named provider. depth: full blocks under way (1..256); block_bytes: a multiple of 4096. */
int zinf_engine_open(const char *provider, unsigned depth, size_t block_bytes, zinf_engine **out);

/* Finishes every request, joins the thread, tells the last counters, and gives the engine back. Tickets stay valid, and
 * files have still to be detached. */
int zinf_engine_close(zinf_engine *engine, zinf_counters *last);

void zinf_engine_counters(zinf_engine *engine, zinf_counters *out);

/* A handle for an open descriptor, which stays the caller's. alignment: bytes that direct transfers need (1: none). */
int zinf_file_attach(zinf_engine *engine, int fd, size_t alignment, zinf_file **out);

/* Waits for the file's requests and drops the handle.
 * timeout_ns < 0: for ever. -ETIMEDOUT if they are not done by then; the handle stays. */
int zinf_file_detach(zinf_file *file, int64_t timeout_ns);

/* Queues a transfer of `length` bytes between memory and the file at `offset`. The memory must stay until the request is
 * done, and what is written must not change before.
 *
 * sums: NULL, or one checksum per page of 4096 bytes, for an offset and a length that are multiples of that; it must stay
 * as long as the memory. A write sets them, a read compares them, and 0 stands for a page that was never written. A
 * checksum depends on the page's content, its place in the file, and `generation`. The I/O thread computes them. */
int zinf_submit(zinf_file *file, int operation, void *address, int64_t offset, size_t length, uint32_t *sums,
                uint64_t generation, zinf_request **out);

/* Waits until this request is done, whatever else is queued: a request that is waited for goes to the head of the queue.
 * timeout_ns < 0: for ever. -ETIMEDOUT if it is not done by then. */
int zinf_wait(zinf_request *request, int64_t timeout_ns);

/* 1 if the request is done. */
int zinf_done(zinf_request *request);

/* How a done request ended. */
void zinf_result(zinf_request *request, zinf_outcome *out);

/* Drops the ticket. The transfer, if under way, goes on. */
void zinf_release(zinf_request *request);

/* Alignment in bytes that direct I/O on this file needs, for memory and for offsets: at least 4096, also where the system
 * doesn't say (STATX_DIOALIGN missing); 0 where it says that the file has no direct I/O. */
int64_t zinf_alignment(int fd);

/* cdef end */

#endif

/* Faults that tests inject: which block is hit, and how. */
#ifndef ZINF_FAULTS_H
#define ZINF_FAULTS_H

#include "engine.h"

#include <stdatomic.h>

#define ZINF_MAX_FAULTS 16

/* The owner locks. */
struct zinf_faults {
    atomic_uint armed; /* who sees none, needs no lock */
    uint64_t fired;
    struct {
        zinf_fault fault;
        int64_t seen;
    } entries[ZINF_MAX_FAULTS];
};

int zinf_faults_add(struct zinf_faults *faults, const zinf_fault *fault);

/* Counts a block that passes the stage. Returns 1 and the fault that hits it, or 0. */
int zinf_faults_hit(struct zinf_faults *faults, int stage, int operation, zinf_fault *out);

#endif

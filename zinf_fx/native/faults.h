/* Faults that tests inject: which block is hit, and how. */
#ifndef ZINF_FAULTS_H
#define ZINF_FAULTS_H

#include "engine.h"

#include <stdatomic.h>
#include <stdbool.h>

#define ZINF_MAX_FAULTS 16

/* The owner locks. */
struct zinf_faults {
    atomic_uint armed; /* who sees none, needs no lock */
    struct zinf_armed {
        zinf_fault fault;
        int64_t seen;
    } entries[ZINF_MAX_FAULTS];
};

/* 0, or a negated errno. NULL disarms every one. */
int zinf_faults_add(struct zinf_faults *faults, const zinf_fault *fault);

/* Counts a block that passes the stage. Whether a fault hits it: which one. */
bool zinf_faults_hit(struct zinf_faults *faults, int stage, int operation, zinf_fault *out);

#endif

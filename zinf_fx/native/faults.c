#include "faults.h"

#include "provider.h"

#include <errno.h>
#include <stdatomic.h>

static atomic_llong setup_calls;
static atomic_llong setup_nth;
static atomic_int setup_error;

int zinf_faults_add(struct zinf_faults *faults, const zinf_fault *fault)
{
    if (!fault) {
        faults->armed = 0;
        return 0;
    }
    if (faults->armed == ZINF_MAX_FAULTS)
        return -ENOSPC;
    if (fault->nth < 1 || fault->count < 1 || (fault->stage != ZINF_SUBMISSION && fault->stage != ZINF_COMPLETION))
        return -EINVAL;
    faults->entries[faults->armed++] = (struct zinf_armed){.fault = *fault};
    return 0;
}

bool zinf_faults_hit(struct zinf_faults *faults, int stage, int operation, zinf_fault *out)
{
    bool hit = false;
    for (unsigned i = 0; i < faults->armed; i++) {
        const zinf_fault *fault = &faults->entries[i].fault;
        if (fault->stage != stage || (fault->operation != ZINF_ANY && fault->operation != operation))
            continue;
        int64_t past = ++faults->entries[i].seen - fault->nth;
        if (!hit && past >= 0 && past < fault->count) {
            *out = *fault;
            hit = true;
        }
    }
    return hit;
}

int64_t zinf_inject_setup(int64_t nth, int error)
{
    int64_t calls = atomic_exchange(&setup_calls, 0);
    atomic_store(&setup_error, error);
    atomic_store(&setup_nth, nth);
    return calls;
}

int zinf_setup_fault(void)
{
    long long call = atomic_fetch_add(&setup_calls, 1) + 1;
    return call == atomic_load(&setup_nth) ? -atomic_load(&setup_error) : 0;
}

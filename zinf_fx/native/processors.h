/* One version of a function for each kind of x86-64 processor, where the compiler can make them. */
#ifndef ZINF_PROCESSORS_H
#define ZINF_PROCESSORS_H

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12 && !defined(__SANITIZE_THREAD__)
/* The compiler makes one version for each of these processors, and the loader takes the best: before the sanitizer of
 * threads is there, which the choice would call. */
#define FOR_EACH_PROCESSOR __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default"), optimize("O3")))
#define FOR_PROCESSOR(name) __attribute__((target("arch=" name), optimize("O3")))
#define HAS_PROCESSORS
#include <immintrin.h>
#else
#define FOR_EACH_PROCESSOR
#endif

#endif

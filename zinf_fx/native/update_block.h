/* The arithmetic of update.h over elements [first, first + count) of operands: one block, or what is left of one. It is
 * included once for each set of instructions: see update.c. */

#define ALWAYS static inline __attribute__((always_inline))
#define V NAMED(vector)
#define ALL NAMED(all)
#define FMA NAMED(fma)

/* How to divide by one positive number, often. */
struct NAMED(divisor) {
    V number, inverse;
    int multiplies;
};

/* The quotient by multiplication with the inverse, to which what it lacks is added twice, is rounded as that of a
 * division (Markstein, 1990), where nothing on the way is subnormal or infinite. A division takes four times as long. */
ALWAYS struct NAMED(divisor) NAMED(divisor)(float number)
{
    struct NAMED(divisor) divisor = {ALL(number), ALL(1 / number), number > 0x1p-80f && number < 0x1p100f};
    return divisor;
}

/* Values are finite. */
ALWAYS V NAMED(divide)(V values, struct NAMED(divisor) by)
{
    if (NAMED(LANES) == 1 || !by.multiplies)
        return values / by.number;
    const V near = values * by.inverse, nearer = FMA(FMA(-near, by.number, values), by.inverse, near);
    return FMA(FMA(-nearer, by.number, values), by.inverse, nearer);
}

/* Where the values of a state are on their way: codes are of all values of a block at once, which wait in `space`. */
struct NAMED(state) {
    const struct zinf_kept *kept;
    size_t first;
    V scale, largest;
    float *space;
};

ALWAYS struct NAMED(state) NAMED(open)(const struct zinf_kept *kept, size_t first, float *space)
{
    const int has_scale = kept->kind == ZINF_CODES && !kept->is_new;
    const float scale = has_scale ? ((const float *)kept->companion)[first / ZINF_BLOCK] : 0;
    struct NAMED(state) state = {kept, first, ALL(scale), ALL(0), space};
    return state;
}

ALWAYS V NAMED(values)(const struct zinf_kept *kept, size_t at)
{
    if (kept->kind == ZINF_FP32)
        return NAMED(load)((const float *)kept->values + at);
    if (kept->kind == ZINF_BF16)
        return NAMED(of_bf16)((const uint16_t *)kept->values + at);
    return NAMED(of_fp16)((const uint16_t *)kept->values + at);
}

ALWAYS void NAMED(keep)(const struct zinf_kept *kept, size_t at, V values)
{
    if (kept->kind == ZINF_FP32)
        NAMED(store)((float *)kept->values + at, values);
    else if (kept->kind == ZINF_BF16)
        NAMED(to_bf16)((uint16_t *)kept->values + at, values);
    else
        NAMED(to_fp16)((uint16_t *)kept->values + at, values);
}

ALWAYS V NAMED(read)(const struct NAMED(state) *state, size_t i)
{
    const struct zinf_kept *kept = state->kept;
    if (kept->is_new)
        return ALL(0);
    if (kept->kind == ZINF_CODES)
        return NAMED(of_codes)((const uint8_t *)kept->values + state->first + i, kept->map->values) * state->scale;
    return NAMED(values)(kept, state->first + i);
}

ALWAYS void NAMED(write)(struct NAMED(state) *state, size_t i, V values)
{
    if (state->kept->kind == ZINF_CODES) {
        NAMED(store)(state->space + i, values);
        state->largest = NAMED(largest_of)(state->largest, values);
    } else
        NAMED(keep)(state->kept, state->first + i, values);
}

/* All of its values are written. */
ALWAYS void NAMED(close)(const struct NAMED(state) *state, size_t count)
{
    const struct zinf_kept *kept = state->kept;
    if (kept->kind != ZINF_CODES)
        return;
    const float largest = NAMED(largest)(state->largest), scale = largest < INFINITY ? largest : NAN;
    ((float *)kept->companion)[state->first / ZINF_BLOCK] = scale;
    const struct NAMED(divisor) divisor = NAMED(divisor)(scale > 0 ? scale : 1);
    uint8_t *codes = (uint8_t *)kept->values + state->first;
    for (size_t i = 0; i < count; i += NAMED(LANES))
        NAMED(to_codes)(codes + i, NAMED(divide)(NAMED(load)(state->space + i), divisor), kept->map->places);
}

static void NAMED(adam)(const struct zinf_adam *options, const struct zinf_operands *operands, size_t first,
                        size_t count)
{
    const struct zinf_adam o = *options;
    const struct zinf_operands p = *operands;
    const int splits = p.master.kind == ZINF_SPLIT, rounds = !splits && p.weight.values;
    const int is_small = o.exp_avg_rate < 0.5f;
    const size_t in_vectors = count - count % VECTOR;
    const V rate = ALL(is_small ? o.exp_avg_rate : o.exp_avg_rate - 1);
    const struct NAMED(divisor) root = NAMED(divisor)(p.root);
    float spaces[3][ZINF_BLOCK] __attribute__((aligned(64)));
    struct NAMED(state) first_moments = NAMED(open)(&p.exp_avg, first, spaces[0]);
    struct NAMED(state) second_moments = NAMED(open)(&p.exp_avg_sq, first, spaces[1]);
    struct NAMED(state) largest = NAMED(open)(&p.max_exp_avg_sq, first, spaces[2]);
    for (size_t i = 0; i < count; i += NAMED(LANES)) {
        V gradient = NAMED(values)(&p.gradient, first + i) * ALL(o.direction);
        V master;
        if (splits)
            master = NAMED(join)(p.weight.values, p.master.values, p.master.companion, first + i);
        else
            master = NAMED(values)(&p.master, first + i);
        if (o.weight_decay != 0)
            gradient = FMA(master, ALL(o.weight_decay), gradient);
        V exp_avg = NAMED(read)(&first_moments, i), exp_avg_sq = NAMED(read)(&second_moments, i);
        exp_avg = FMA(rate, gradient - exp_avg, is_small ? exp_avg : gradient);
        /* Which of two products PyTorch's kernel doesn't round is its compiler's choice. */
        const V part = ALL(o.exp_avg_sq_rate) * gradient;
        if (NAMED(LANES) > 1 || i < in_vectors)
            exp_avg_sq = FMA(part, gradient, exp_avg_sq * ALL(o.beta2));
        else
            exp_avg_sq = FMA(exp_avg_sq, ALL(o.beta2), part * gradient);
        NAMED(write)(&first_moments, i, exp_avg);
        NAMED(write)(&second_moments, i, exp_avg_sq);
        if (o.amsgrad) {
            const int propagates = NAMED(LANES) > 1 || i < count - count % o.vector;
            exp_avg_sq = NAMED(maximum)(NAMED(read)(&largest, i), exp_avg_sq, propagates);
            NAMED(write)(&largest, i, exp_avg_sq);
        }
        const V deviation = NAMED(sqrt)(exp_avg_sq);
        const V denominator = NAMED(if_finite)(deviation, NAMED(divide)(deviation, root), deviation) + ALL(o.eps);
        master = master * ALL(o.shrinking) + ALL(p.step_size) * exp_avg / denominator;
        if (splits)
            NAMED(split)(p.weight.values, p.master.values, p.master.companion, first + i, master);
        else
            NAMED(keep)(&p.master, first + i, master);
        if (rounds)
            NAMED(keep)(&p.weight, first + i, master);
    }
    NAMED(close)(&first_moments, count);
    NAMED(close)(&second_moments, count);
    if (o.amsgrad)
        NAMED(close)(&largest, count);
}

#undef ALWAYS
#undef V
#undef ALL
#undef FMA

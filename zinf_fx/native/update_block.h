/* The arithmetic of update.h over elements [first, first + count) of operands: whole blocks, or what is left of one. It
 * is included once for each set of instructions: see update.c. */

#define ALWAYS static inline __attribute__((always_inline))
#define V NAMED(vector)
#define ALL NAMED(all)
#define FMA NAMED(fma)
#define LANES NAMED(LANES)
#define PARTS NAMED(PARTS)

/* How to divide by one positive number, often. */
struct NAMED(divisor) {
    V number, inverse, rest; /* what the inverse lacks */
    int multiplies;
};

/* The product with the inverse, in twice the precision, is one of the two numbers beside the quotient; with what it
 * lacks added, it is rounded as a division is (Markstein, 1990), where nothing on the way is subnormal or infinite. (By
 * the smallest scales, quotients below 2^-30 may be the number beside it, which is the same code.) A division takes four
 * times as long. */
ALWAYS struct NAMED(divisor) NAMED(divisor)(float number)
{
    const float inverse = 1 / number, rest = fmaf(-number, inverse, 1) * inverse;
    struct NAMED(divisor) divisor = {ALL(number), ALL(inverse), ALL(rest), number > 0x1p-80f && number < 0x1p100f};
    return divisor;
}

/* Values are finite, or the quotient is NaN. */
ALWAYS V NAMED(divide)(V values, const struct NAMED(divisor) *by)
{
    if (LANES == 1 || !by->multiplies)
        return values / by->number;
    const V near = FMA(values, by->inverse, values * by->rest);
    return FMA(FMA(-near, by->number, values), by->inverse, near);
}

/* Begin to read what comes so much later: processors prefetch up to the end of a page of memory, and no further. It may
 * lie behind the last element. */
ALWAYS void NAMED(prefetch)(const struct zinf_kept *kept, size_t at)
{
    const size_t size = kept->kind == ZINF_FP32 ? 4 : kept->kind == ZINF_CODES ? 1 : 2;
    for (size_t byte = 0; byte < PARTS * LANES * size; byte += 64)
        __builtin_prefetch((const char *)kept->values + (at + AHEAD) * size + byte);
}

/* A state of a block. Codes are made of all values of a block at once, beside the update of the next one: until then,
 * the values wait in `space`. */
struct NAMED(state) {
    const struct zinf_kept *kept;
    size_t first;
    V scale, largest;
    struct NAMED(divisor) divisor;
    float space[ZINF_BLOCK] __attribute__((aligned(64)));
};

ALWAYS void NAMED(open)(struct NAMED(state) *state, size_t first)
{
    const struct zinf_kept *kept = state->kept;
    const int has_scale = kept->kind == ZINF_CODES && !kept->is_new;
    state->first = first, state->largest = ALL(0);
    state->scale = ALL(has_scale ? ((const float *)kept->companion)[first / ZINF_BLOCK] : 0);
}

ALWAYS void NAMED(values)(const struct zinf_kept *kept, size_t at, V *values)
{
    if (kept->kind == ZINF_FP32)
        NAMED(of_fp32)((const float *)kept->values + at, values);
    else if (kept->kind == ZINF_BF16)
        NAMED(of_bf16)((const uint16_t *)kept->values + at, values);
    else
        NAMED(of_fp16)((const uint16_t *)kept->values + at, values);
}

ALWAYS void NAMED(keep)(const struct zinf_kept *kept, size_t at, const V *values)
{
    if (kept->kind == ZINF_FP32)
        NAMED(to_fp32)((float *)kept->values + at, values);
    else if (kept->kind == ZINF_BF16)
        NAMED(to_bf16)((uint16_t *)kept->values + at, values);
    else
        NAMED(to_fp16)((uint16_t *)kept->values + at, values);
}

ALWAYS void NAMED(read)(const struct NAMED(state) *state, size_t i, V *values)
{
    const struct zinf_kept *kept = state->kept;
    if (kept->is_new)
        for (int part = 0; part < PARTS; part++) values[part] = ALL(0);
    else if (kept->kind == ZINF_CODES) {
        NAMED(of_codes)((const uint8_t *)kept->values + state->first + i, kept->map->values, values);
        for (int part = 0; part < PARTS; part++) values[part] = values[part] * state->scale;
    } else
        NAMED(values)(kept, state->first + i, values);
}

ALWAYS void NAMED(write)(struct NAMED(state) *state, size_t i, const V *values)
{
    if (state->kept->kind == ZINF_CODES)
        for (int part = 0; part < PARTS; part++) {
            NAMED(store)(state->space + i + part * LANES, values[part]);
            state->largest = NAMED(largest_of)(state->largest, values[part]);
        }
    else
        NAMED(keep)(state->kept, state->first + i, values);
}

/* All values of the block are written. */
ALWAYS void NAMED(close)(struct NAMED(state) *state)
{
    if (state->kept->kind != ZINF_CODES)
        return;
    const float largest = NAMED(largest)(state->largest), scale = largest < INFINITY ? largest : NAN;
    ((float *)state->kept->companion)[state->first / ZINF_BLOCK] = scale;
    state->divisor = NAMED(divisor)(scale > 0 ? scale : 1);
    state->divisor.multiplies &= !isnan(scale); /* the quotient of what is infinite is infinite */
}

/* Behind `close`. */
ALWAYS void NAMED(encode)(const struct NAMED(state) *state, size_t i)
{
    const struct zinf_kept *kept = state->kept;
    if (kept->kind != ZINF_CODES)
        return;
    V quotients[PARTS];
    for (int part = 0; part < PARTS; part++)
        quotients[part] = NAMED(divide)(NAMED(load)(state->space + i + part * LANES), &state->divisor);
    NAMED(to_codes)((uint8_t *)kept->values + state->first + i, quotients, kept->map->places);
}

/* What is the same for all elements. */
struct NAMED(constants) {
    struct zinf_options o;
    struct NAMED(divisor) root;
    V step_size, exp_avg_rate;
    int is_new;
};

/* `in_vectors`: whether PyTorch's kernel does this by vectors; `propagates`: see maximum_plain. */
ALWAYS void NAMED(adam)(const struct NAMED(constants) *c, int in_vectors, int propagates, int amsgrad, V gradient,
                        V *master, V *exp_avg, V *exp_avg_sq, V *largest)
{
    const int is_small = c->o.exp_avg_rate < 0.5f;
    *exp_avg = FMA(c->exp_avg_rate, gradient - *exp_avg, is_small ? *exp_avg : gradient);
    /* Which of two products PyTorch's kernel doesn't round is its compiler's choice. */
    const V product = ALL(c->o.exp_avg_sq_rate) * gradient;
    if (in_vectors)
        *exp_avg_sq = FMA(product, gradient, *exp_avg_sq * ALL(c->o.beta2));
    else
        *exp_avg_sq = FMA(*exp_avg_sq, ALL(c->o.beta2), product * gradient);
    V square = *exp_avg_sq;
    if (amsgrad)
        square = *largest = NAMED(maximum)(*largest, square, propagates);
    /* The root is at most 1. Where the deviation is infinite, what multiplications make of it is NaN. */
    const V deviation = NAMED(sqrt)(square);
    const V denominator = NAMED(maximum)(deviation, NAMED(divide)(deviation, &c->root), 0) + ALL(c->o.eps);
    *master = *master * ALL(c->o.shrinking) + c->step_size * *exp_avg / denominator;
}

ALWAYS void NAMED(sgd)(const struct NAMED(constants) *c, int in_vectors, int has_momentum, V gradient, V *master,
                       V *momentum_buffer)
{
    if (has_momentum) {
        const V momentum = ALL(c->o.momentum), rate = ALL(c->o.momentum_rate);
        if (c->is_new)
            *momentum_buffer = gradient;
        else if (in_vectors)
            *momentum_buffer = FMA(gradient, rate, *momentum_buffer * momentum);
        else
            *momentum_buffer = FMA(*momentum_buffer, momentum, gradient * rate);
        gradient = c->o.nesterov ? FMA(*momentum_buffer, momentum, gradient) : *momentum_buffer;
    }
    *master = FMA(gradient, c->step_size, *master);
}

/* With the number of states that `rule` has with the options. */
ALWAYS void NAMED(update_by)(int rule, int number, const struct zinf_options *options,
                             const struct zinf_operands *operands, size_t first, size_t count)
{
    const struct zinf_operands p = *operands;
    const float rate = options->exp_avg_rate;
    const struct NAMED(constants) constants = {*options, NAMED(divisor)(p.root), ALL(p.step_size),
                                               ALL(rate < 0.5f ? rate : rate - 1), p.states[0].is_new};
    const int splits = p.master.kind == ZINF_SPLIT, rounds = !splits && p.weight.values;
    const size_t in_vectors = count - count % VECTOR, propagate = count - count % options->vector;
    struct NAMED(state) of_two[2][ZINF_STATES], *states = of_two[0], *before = of_two[1]; /* and of the block before */
    int has_codes = 0;
    for (int k = 0; k < number; k++) {
        states[k].kept = before[k].kept = &p.states[k];
        has_codes |= p.states[k].kind == ZINF_CODES;
    }
    for (size_t start = 0; start < count; start += ZINF_BLOCK) {
        const size_t end = count - start < ZINF_BLOCK ? count - start : ZINF_BLOCK;
        for (int k = 0; k < number; k++) NAMED(open)(&states[k], first + start);
        for (size_t i = 0; i < end; i += PARTS * LANES) {
            const size_t at = first + start + i;
            const int by_vectors = LANES > 1 || start + i < in_vectors, propagates = LANES > 1 || start + i < propagate;
            V gradients[PARTS], masters[PARTS], values[ZINF_STATES][PARTS];
            if (LANES > 1) {
                NAMED(prefetch)(&p.gradient, at);
                NAMED(prefetch)(&p.master, at);
                for (int k = 0; k < number; k++) NAMED(prefetch)(&p.states[k], at);
                if (splits)
                    NAMED(prefetch)(&p.weight, at);
            }
            NAMED(values)(&p.gradient, at, gradients);
            if (splits)
                NAMED(join)(p.weight.values, p.master.values, p.master.companion, at, masters);
            else
                NAMED(values)(&p.master, at, masters);
            for (int k = 0; k < number; k++) NAMED(read)(&states[k], i, values[k]);
            for (int part = 0; part < PARTS; part++) {
                V gradient = gradients[part] * ALL(options->direction);
                if (options->weight_decay != 0)
                    gradient = FMA(masters[part], ALL(options->weight_decay), gradient);
                if (rule == ZINF_ADAM)
                    NAMED(adam)(&constants, by_vectors, propagates, number == 3, gradient, &masters[part],
                                &values[0][part], &values[1][part], &values[2][part]);
                else
                    NAMED(sgd)(&constants, by_vectors, number == 1, gradient, &masters[part], &values[0][part]);
            }
            for (int k = 0; k < number; k++) NAMED(write)(&states[k], i, values[k]);
            if (splits)
                NAMED(split)(p.weight.values, p.master.values, p.master.companion, at, masters);
            else
                NAMED(keep)(&p.master, at, masters);
            if (rounds)
                NAMED(keep)(&p.weight, at, masters);
        }
        if (has_codes && start)
            for (int k = 0; k < number; k++)
                for (size_t i = 0; i < ZINF_BLOCK; i += PARTS * LANES) NAMED(encode)(&before[k], i);
        for (int k = 0; k < number; k++) NAMED(close)(&states[k]);
        struct NAMED(state) *const last = states;
        states = before, before = last;
    }
    for (size_t i = 0; has_codes && i < (count - 1) % ZINF_BLOCK + 1; i += PARTS * LANES)
        for (int k = 0; k < number; k++) NAMED(encode)(&before[k], i);
}

static void NAMED(update)(const struct zinf_options *options, const struct zinf_operands *operands, size_t first,
                          size_t count)
{
    if (options->rule == ZINF_ADAM && !options->amsgrad)
        NAMED(update_by)(ZINF_ADAM, 2, options, operands, first, count);
    else if (options->rule == ZINF_ADAM)
        NAMED(update_by)(ZINF_ADAM, 3, options, operands, first, count);
    else if (options->momentum != 0)
        NAMED(update_by)(ZINF_SGD, 1, options, operands, first, count);
    else
        NAMED(update_by)(ZINF_SGD, 0, options, operands, first, count);
}

#undef ALWAYS
#undef V
#undef ALL
#undef FMA
#undef LANES
#undef PARTS

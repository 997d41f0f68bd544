/* block_path.softmax in vectors of BITS bits (vectors/exponential.h), with HIDE(score, t, last, first), which is MASKED where a
 * query does not see key t, because it lies outside first to last, and UNLESS_MASKED(score, weight), which is 0 where score is MASKED. */

/* The order is horizontal_sum's, so that eight keys may also lie in lanes (softmax_head). */
INLINE_VECTOR VECTOR NAME(sum_of_eight)(const VECTOR v[8]) {
    const VECTOR even = MM(add_ps)(MM(add_ps)(v[0], v[4]), MM(add_ps)(v[2], v[6]));
    return MM(add_ps)(even, MM(add_ps)(MM(add_ps)(v[1], v[5]), MM(add_ps)(v[3], v[7])));
}

/* keys % 8 == 0. */
INLINE_VECTOR void NAME(softmax_keys)(float *scores, int64_t t, int64_t keys, const panel_state *s, int hides, float *factor) {
    for (int l = 0; l < LANES; l += BITS / 32) {
        const INTEGERS at = LOAD_INTEGERS(s->position + l), last = LOAD_INTEGERS(s->last + l);
        const INTEGERS first = s->window ? MM(sub_epi32)(at, MM(set1_epi32)((int32_t)s->window - 1)) : MM_BITS(setzero_si)();
        const VECTOR before = MM(loadu_ps)(s->largest + l), scaling = MM(set1_ps)(s->scaling);
        VECTOR most = before, sum[8];
        for (int i = 0; i < 8; i++) sum[i] = MM(setzero_ps)();
        for (int64_t k = 0; k < keys; k++) {
            VECTOR score = MM(mul_ps)(MM(loadu_ps)(scores + k * LANES + l), scaling);
            if (hides) score = HIDE(score, MM(set1_epi32)((int32_t)(t + k)), last, first);
            MM(storeu_ps)(scores + k * LANES + l, score);
            most = MM(max_ps)(most, score);
        }
        for (int64_t k = 0; k < keys; k += 8)
            for (int i = 0; i < 8; i++) {
                const VECTOR score = MM(loadu_ps)(scores + (k + i) * LANES + l);
                const VECTOR weight = UNLESS_MASKED(score, NAME(rounded_to_bf16)(NAME(exponential)(MM(sub_ps)(score, most))));
                MM(storeu_ps)(scores + (k + i) * LANES + l, weight);
                sum[i] = MM(add_ps)(sum[i], weight);
            }
        const VECTOR rescale = NAME(exponential)(MM(sub_ps)(before, most));
        MM(storeu_ps)(factor + l, rescale);
        MM(storeu_ps)(s->largest + l, most);
        MM(storeu_ps)(s->total + l, MM(fmadd_ps)(MM(loadu_ps)(s->total + l), rescale, NAME(sum_of_eight)(sum)));
    }
    memset(scores + keys * LANES, 0, sizeof *scores * (size_t)((padded(keys) - keys) * LANES));
}

TARGET void SOFTMAX(float *scores, int64_t t, int64_t keys, const panel_state *s, float *factor) {
    keys = ceil_div(keys, 8) * 8; /* no query sees later keys */
    if (hides_keys(s, t, keys)) NAME(softmax_keys)(scores, t, keys, s, 1, factor);
    else NAME(softmax_keys)(scores, t, keys, s, 0, factor);
}

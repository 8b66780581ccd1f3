/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The gated delta rule, backward: a block takes a job (mt_delta_jobs()), and its value heads in order, so that their
 * sums in dq and dk have one order. The states before the document's chunks are made again, then it takes the chunks in
 * reverse. Some jobs are done at a time, whose states the workspace has room for. There are more of them if it has but
 * some of their states: a block makes those between once more. What several jobs of a key head have in dq and dk is
 * added last.
 */
#include "delta_chunk.cuh"

using namespace delta;

/* Rows x warps: f(row) is called by a whole warp. */
template <typename F> MT_DEVICE void by_rows(int n, F f)
{
    MT_UNROLL(1)
    for (int i = static_cast<int>(threadIdx.x) / WARP; i < n; i += THREADS / WARP)
        f(i);
    __syncthreads();
}

MT_DEVICE void add_row(float *y, const float *x, float by, int n)
{
    MT_UNROLL(1)
    for (int c = static_cast<int>(threadIdx.x) % WARP; c < n; c += WARP)
        y[c] += by * x[c];
}

/* dV', dP, and what of dQ, dK, dW and dG comes of them. */
MT_DEVICE void outputs_backward(const work &w, rows &r, bool plain, int n, const float *s, const float *ds)
{
    int wk = w.wk, wv = w.wv, wide = w.wide;
    bool first = threadIdx.x % WARP == 0;
    multiply<false>({C, C, wv, w.d_o, wv, 1, w.vn, 1, wv, w.dp, C, 1, nullptr, 0, 0});
    scale_rows(w.t, w.k, r.end, wk);
    multiply<false>({C, wv, C, w.p, 1, C, w.d_o, wv, 1, w.yz, wide, 1, nullptr, 0, 0});
    multiply({C, wv, wk, w.t, wk, 1, ds, wv, 1, w.yz, wide, 1, w.yz, wide, 1});
    if (!plain)
        multiply<false>({C, wk, wv, w.yz, wide, 1, s, 1, wv, w.yz + wv, wide, -1, nullptr, 0, 0}); /* dW */
    multiply<false>({C, wk, wv, w.d_o, wv, 1, s, 1, wv, w.t, wk, 1, nullptr, 0, 0}); /* dO S^T */
    by_rows(n, [&](int i) {
        double along = static_cast<double>(r.decay[i]) * value_of(warp_dot(w.q + i * wk, w.t + i * wk, wk));
        add_row(w.dq + i * wk, w.t + i * wk, r.decay[i], wk);
        if (first)
            r.dsum[i] = along;
    });
    multiply<false>({C, wk, wv, w.vn, wv, 1, ds, 1, wv, w.t, wk, 1, nullptr, 0, 0}); /* V' dS^T */
    by_rows(n, [&](int i) {
        double along = static_cast<double>(r.end[i]) * value_of(warp_dot(w.k + i * wk, w.t + i * wk, wk));
        add_row(w.dk + i * wk, w.t + i * wk, r.end[i], wk);
        if (first) {
            r.dsum[i] -= along;
            r.part[i] = along;
        }
    });
    by_rows(THREADS / WARP, [&](int i) {
        int some = wk * wv / static_cast<int>(THREADS / WARP);
        double part = value_of(warp_dot(s + i * some, ds + i * some, some));
        if (first)
            r.dbeta[i] = part;
    });
    if (threadIdx.x == 0) {
        double all = 0, states = 0;
        MT_UNROLL(1)
        for (int i = 0; i < n; i++)
            all += r.part[i];
        MT_UNROLL(1)
        for (int i = 0; i < static_cast<int>(THREADS / WARP); i++)
            states += r.dbeta[i];
        r.dsum[n - 1] += all + static_cast<double>(r.decay[n - 1]) * states;
    }
    __syncthreads();
}

/* (I + A)^T [Y | Z] = [dV' | dW]. */
MT_DEVICE void solve_transposed(const work &w, int n)
{
    MT_UNROLL(1)
    for (int from = (n - 1) / BAND * BAND; from >= 0; from -= BAND) {
        int next = from + BAND, rows = n < next ? n - from : BAND;
        if (next < n)
            multiply<false>({BAND, w.wide, n - next, w.a + next * C + from, 1, C, w.yz + next * w.wide, w.wide, 1, w.t,
                             w.wide, 1, nullptr, 0, 0});
        solve_band<true>(w, w.yz, from, rows, next < n, [&](int i, int c) { return w.yz[i * w.wide + c]; });
    }
}

/* dA, masked to its triangle; dP becomes dP * X, dA N; their part of dG and dbeta. */
MT_DEVICE void scores_backward(const work &w, rows &r, bool plain, int n)
{
    if (!plain)
        multiply<false>({C, C, w.wide, w.yz, w.wide, 1, w.uw, 1, w.wide, w.da, C, -1, nullptr, 0, 0});
    by_rows(n, [&](int i) { /* row i and column i of M = dP * P + dA * A */
        pair m = {}, beta = {};
        MT_UNROLL(1)
        for (int j = static_cast<int>(threadIdx.x) % WARP; j < n; j += WARP) {
            int at = i * C + j, across = j * C + i;
            if (j <= i)
                m = plus_product(m, w.dp[at], w.p[at]);
            if (j >= i)
                m = plus_product(m, -w.dp[across], w.p[across]);
            if (!plain && j < i) {
                m = plus_product(m, w.da[at], w.a[at]);
                beta = plus_product(beta, w.da[at], w.kk[at] * w.x[at]);
            }
            if (!plain && j > i)
                m = plus_product(m, -w.da[across], w.a[across]);
        }
        m = warp_total(m);
        beta = warp_total(beta);
        if (threadIdx.x % WARP == 0) {
            r.dsum[i] += value_of(m);
            r.dbeta[i] = value_of(beta);
        }
    });
    for_all(C * C, [&](int at) { return w.dp[at] * w.x[at]; }, [&](int at, float v) { w.dp[at] = v; });
    auto of = [&](int at) { /* X and beta are 0 after the last row */
        return at % C < at / C ? r.beta[at / C] * w.da[at] * w.x[at] : 0.0f;
    };
    if (!plain)
        for_all(C * C, of, [&](int at, float v) { w.da[at] = v; });
}

/* dv, dbeta and dg of a value head. */
MT_DEVICE void store_head(const work &w, rows &r, const struct mt_delta_rule_bwd &b, size_t row, size_t h, int n)
{
    by_rows(n, [&](int i) {
        const float *y = w.yz + i * w.wide, *z = y + w.wv, *v = w.v + i * w.wv;
        double beta = value_of(warp_dot(y, v, w.wv));
        float skip = b.fwd.skip ? value_of<float>(warp_dot(w.d_o + i * w.wv, v, w.wv)) : 0.0f;
        size_t at = (row + i) * b.fwd.v.n + h;
        if (!b.fwd.plain) {
            double along = value_of(warp_dot(z, w.k + i * w.wk, w.wk)) * static_cast<double>(r.decay[i]);
            beta += along;
            add_row(w.dk + i * w.wk, z, r.decay[i] * r.beta[i], w.wk);
            if (threadIdx.x % WARP == 0)
                r.dsum[i] += along * static_cast<double>(r.beta[i]);
        }
        if (threadIdx.x % WARP == 0) {
            b.dbeta[at] = static_cast<float>(r.dbeta[i] + beta);
            if (b.fwd.skip)
                b.dskip[at] = skip;
        }
    });
    MT_UNROLL(1)
    for (int at = static_cast<int>(threadIdx.x); at < n * w.wv; at += THREADS)
        w.t[at] = r.beta[at / w.wv] * w.yz[at / w.wv * w.wide + at % w.wv];
    if (threadIdx.x == 0) {
        double sum = 0;
        MT_UNROLL(1)
        for (int i = n - 1; i >= 0; i--) {
            sum += r.dsum[i];
            b.dg[(row + i) * b.fwd.v.n + h] = static_cast<float>(sum);
        }
    }
    __syncthreads();
    add_skip(b.fwd, h, w.t, w.d_o, n * w.wv);
    store_rows(w.t, w.wv, b.dv, b.fwd.dtype, row, h, n);
}

MT_DEVICE void backward_head(const work &w, rows &r, const struct mt_delta_rule_bwd &b,
                             size_t row, size_t h, int n, const float *s, float *ds)
{
    int wk = w.wk, wv = w.wv, wide = w.wide;
    bool plain = b.fwd.plain;
    solve(w, r, b.fwd, row, h, n, s);
    load_rows(w.d_o, wv, b.d_o, b.fwd.dtype, row, h, n);
    outputs_backward(w, r, plain, n, s, ds);
    scale_rows(w.t, w.q, r.decay, wk);
    multiply({wk, wv, C, w.t, 1, wk, w.d_o, wv, 1, ds, wv, 1, ds, wv, r.decay[n - 1]});
    if (!plain) {
        multiply({wk, wv, C, w.uw + wv, 1, wide, w.yz, wide, 1, ds, wv, -1, ds, wv, 1});
        solve_transposed(w, n);
    }
    scores_backward(w, r, plain, n);
    multiply({C, wk, C, w.dp, C, 1, w.k, wk, 1, w.dq, wk, 1, w.dq, wk, 1});
    multiply({C, wk, C, w.dp, 1, C, w.q, wk, 1, w.dk, wk, 1, w.dk, wk, 1});
    if (!plain) {
        multiply({C, wk, C, w.da, C, 1, w.k, wk, 1, w.dk, wk, 1, w.dk, wk, 1});
        multiply({C, wk, C, w.da, 1, C, w.k, wk, 1, w.dk, wk, 1, w.dk, wk, 1});
    }
    store_head(w, r, b, row, h, n);
}

/* Through x = r x': d' = r (d - x (x . d)), where x is of unit length but for eps. */
MT_DEVICE void normalise_backward(float *d, const float *x, const float *rstd, float scale, int n, int wide)
{
    by_rows(n, [&](int i) {
        float *di = d + i * wide, along = value_of<float>(warp_dot(x + i * wide, di, wide)) / (scale * scale);
        MT_UNROLL(1)
        for (int c = static_cast<int>(threadIdx.x) % WARP; c < wide; c += WARP)
            di[c] = (di[c] - along * x[i * wide + c]) * (rstd[i] * scale);
    });
}

/* Rows of dq or dk: as they are, or if key heads have several jobs to the sums of this one. */
MT_DEVICE void store_keys(const float *d, int wide, float *sums, const struct mt_heads &to, enum mt_dtype type,
                          size_t row, size_t head, int n)
{
    struct mt_heads own = to;
    if (sums)
        own = {sums, to.n * to.dim, to.dim, to.n, to.dim};
    store_rows(d, wide, own, sums ? MT_F32 : type, row, head, n);
}

/* dq and dk of a chunk of a job. */
MT_DEVICE void finish_keys(const work &w, rows &r, const struct mt_delta_rule_bwd &b,
                           const struct mt_cuda_delta_buffers &u, const part &own, size_t row,
                           int n)
{
    const struct mt_delta_rule &a = b.fwd;
    size_t all = a.v.n / a.k.n, job = (own.first - own.key * all) / u.jobs.heads, at = job * a.n * a.k.n * a.k.dim;
    if (a.plain) {
        scale_all(w.dq, a.scale, C * w.wk);
    } else {
        normalise_backward(w.dq, w.q, r.rq, a.scale, n, w.wk);
        normalise_backward(w.dk, w.k, r.rk, 1.0f, n, w.wk);
    }
    store_keys(w.dq, w.wk, u.dq ? u.dq + at : nullptr, b.dq, a.dtype, row, own.key, n);
    store_keys(w.dk, w.wk, u.dk ? u.dk + at : nullptr, b.dk, a.dtype, row, own.key, n);
}

/* A slot of the workspace; its pointers would be too many registers. */
MT_DEVICE void take_slot(work *w, const struct mt_cuda_delta_buffers &u)
{
    if (threadIdx.x == 0)
        *w = work_of(u.slots + blockIdx.x * u.slot_floats, u.wk, u.wv, static_cast<int>(u.jobs.heads));
    __syncthreads();
}

/* A job of some: the document's rows, its value heads, and where these are among the states. */
struct task {
    size_t doc, begin, end, place;
    part own;
};

MT_DEVICE task task_of(const struct mt_delta_rule &a, const struct mt_cuda_delta_buffers &u, size_t first_job,
                       size_t n_jobs, size_t job)
{
    size_t doc = job / n_jobs, nth = job % n_jobs;
    return {doc, static_cast<size_t>(a.cu_seqlens[doc]), static_cast<size_t>(a.cu_seqlens[doc + 1]),
            nth * u.jobs.heads, part_of(a, u, first_job + nth)};
}

/* The states that the document begins with. */
MT_DEVICE void begin_states(const struct mt_delta_rule &a, const work &w, const task &t, int n)
{
    clear(w.state, n);
    hand_over<false>(a, w, t.own, w.state, t.doc ? nullptr : a.handed.from);
}

/* The state of a value head of a job before a chunk: kept, or of the block. Kept ones but a document's first are of rows
 * no less than C times `every` after each other. */
MT_DEVICE float *state_before(const work &w, const struct mt_cuda_delta_buffers &u, const task &t, size_t chunk, int i)
{
    size_t one = static_cast<size_t>(w.wk) * w.wv, between = chunk % u.every, row = t.begin + chunk * C;
    if (!chunk)
        return w.state + i * one;
    if (between)
        return u.between + ((blockIdx.x * (u.every - 1) + between - 1) * u.jobs.heads + i) * one;
    return u.states + (row / C / u.every * u.group + t.place + i) * one;
}

/* The states before the chunks behind `chunk`, up to that before `last`, from the one before `chunk`. */
MT_DEVICE void make_states(const work &w, rows &r, const struct mt_delta_rule &a, const struct mt_cuda_delta_buffers &u,
                           const task &t, size_t chunk, size_t last)
{
    MT_UNROLL(1)
    for (; chunk < last; chunk++) {
        size_t row = t.begin + chunk * C;
        load_keys(w, r, a, row, t.own.key, C);
        MT_UNROLL(1)
        for (int i = 0; i < t.own.n; i++) {
            const float *s = state_before(w, u, t, chunk, i);
            solve(w, r, a, row, t.own.first + i, C, s);
            step_state(w, r, C, s, state_before(w, u, t, chunk + 1, i));
        }
    }
}

/* The states before a document's chunks that are kept. */
static __global__ void __launch_bounds__(THREADS, 1)
    delta_states(struct mt_delta_rule a, struct mt_cuda_delta_buffers u, size_t first_job, size_t n_jobs)
{
    __shared__ rows r;
    __shared__ work w;
    int heads = static_cast<int>(u.jobs.heads), one = u.wk * u.wv;
    take_slot(&w, u);
    MT_UNROLL(1)
    for (size_t job = blockIdx.x; job < a.n_docs * n_jobs; job += gridDim.x) {
        task t = task_of(a, u, first_job, n_jobs, job);
        begin_states(a, w, t, heads * one);
        make_states(w, r, a, u, t, 0, (t.end - t.begin - 1) / C / u.every * u.every);
    }
}

static __global__ void __launch_bounds__(THREADS, 1)
    delta_backward(struct mt_delta_rule_bwd b, struct mt_cuda_delta_buffers u, size_t first_job, size_t n_jobs)
{
    __shared__ rows r;
    __shared__ work w;
    const struct mt_delta_rule &a = b.fwd;
    int heads = static_cast<int>(u.jobs.heads), one = u.wk * u.wv;
    take_slot(&w, u);
    MT_UNROLL(1)
    for (size_t job = blockIdx.x; job < a.n_docs * n_jobs; job += gridDim.x) {
        task t = task_of(a, u, first_job, n_jobs, job);
        begin_states(a, w, t, heads * one);
        clear(w.ds, heads * one);
        hand_over<false>(a, w, t.own, w.ds, t.doc + 1 == a.n_docs ? b.handed.from : nullptr);
        MT_UNROLL(1)
        for (size_t chunks = (t.end - t.begin + C - 1) / C, chunk = chunks; chunk-- > 0;) {
            size_t row = t.begin + chunk * C;
            if (chunk + 1 == chunks || (chunk + 1) % u.every == 0)
                make_states(w, r, a, u, t, chunk / u.every * u.every, chunk);
            int n = t.end - row < C ? static_cast<int>(t.end - row) : C;
            load_keys(w, r, a, row, t.own.key, n);
            clear(w.dq, C * w.wk);
            clear(w.dk, C * w.wk);
            MT_UNROLL(1)
            for (int i = 0; i < t.own.n; i++)
                backward_head(w, r, b, row, t.own.first + i, n, state_before(w, u, t, chunk, i), w.ds + i * one);
            finish_keys(w, r, b, u, t.own, row, n);
        }
        hand_over<true>(a, w, t.own, w.ds, t.doc ? nullptr : b.handed.to);
    }
}

/* An element of dq or dk: the sums of its jobs, in order. */
static __global__ void __launch_bounds__(THREADS)
    add_jobs(const float *sums, size_t jobs, size_t n, struct mt_heads to, enum mt_dtype type)
{
    size_t at = static_cast<size_t>(blockIdx.x) * THREADS + threadIdx.x, columns = to.n * to.dim;
    if (at >= n * columns)
        return;
    float sum = sums[at];
    MT_UNROLL(1)
    for (size_t i = 1; i < jobs; i++)
        sum += sums[i * n * columns + at];
    size_t row = at / columns, c = at % columns;
    store_any(to.p, row * to.ld + c / to.dim * to.stride + c % to.dim, type, sum);
}

static cudaError_t add_all_jobs(const struct mt_delta_rule *a, const struct mt_cuda_delta_buffers &u, const float *sums,
                                const struct mt_heads &to, cudaStream_t stream)
{
    dim3 grid = grid_of(ceil_div(a->n * to.n * to.dim, THREADS));
    return MT_LAUNCH(add_jobs, grid, THREADS, 0, stream, sums, u.jobs.of_key, a->n, to, a->dtype);
}

cudaError_t mt_cuda_delta_rule_bwd(const struct mt_delta_rule_bwd *b, cudaStream_t stream)
{
    const struct mt_delta_rule *a = &b->fwd;
    struct mt_cuda_delta_buffers u = mt_cuda_delta_buffers_of(a), states = apart(*a, u);
    size_t some = u.group / u.jobs.heads, each = states.n_jobs / u.n_jobs;
    struct mt_delta_rule_bwd args = *b;
    args.fwd.cu_seqlens_host = nullptr; /* kernels get no host memory */
    cudaError_t rc = cudaSuccess;
    for (size_t job = 0; job < u.n_jobs && rc == cudaSuccess; job += some) {
        size_t n = u.n_jobs - job < some ? u.n_jobs - job : some;
        if (a->max_len > static_cast<size_t>(C)) /* else no document has a second chunk */
            rc = MT_LAUNCH(delta_states, blocks_for(a->n_docs * n * each, u), THREADS, 0, stream, args.fwd, states,
                           job * each, n * each);
        rc = MT_LAUNCH_NEXT(rc, delta_backward, blocks_for(a->n_docs * n, u), THREADS, 0, stream, args, u, job, n);
    }
    if (rc == cudaSuccess && u.dq)
        rc = add_all_jobs(a, u, u.dq, b->dq, stream);
    if (rc == cudaSuccess && u.dk)
        rc = add_all_jobs(a, u, u.dk, b->dk, stream);
    return rc;
}

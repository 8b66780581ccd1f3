/* SPDX-License-Identifier: Apache-2.0 */
/* Checks of each operation's arguments; then the backend's turn. */
#include "device/backend.h"

static int reject(struct mt_err *err, const char *op, const char *what)
{
    return mt_fail(err, MT_ERR_DEVICE, -EINVAL, "%s: %s", op, what);
}

static bool aligned(const void *p)
{
    return p && (uintptr_t)p % 16 == 0;
}

/* NULL is fine: an optional argument. */
static bool aligned_or_null(const void *p)
{
    return (uintptr_t)p % 16 == 0;
}

#define NEED(cond)                                                                                 \
    do {                                                                                           \
        if (!(cond))                                                                               \
            return reject(err, op, "needs " #cond);                                                \
    } while (0)

int mt_op_embedding(mt_device *dev, const struct mt_embedding *a, struct mt_err *err)
{
    const char *op = "embedding";
    NEED(a->c && a->vocab);
    NEED(a->ids && aligned(a->table) && aligned(a->out));
    NEED(a->table != a->out);
    return a->n ? dev->backend->embedding(dev, a, err) : 0;
}

int mt_op_embedding_bwd(mt_device *dev, const struct mt_embedding_bwd *a, struct mt_err *err)
{
    const char *op = "embedding_bwd";
    NEED(a->c && a->vocab);
    NEED(a->run_ids && a->starts && a->order);
    NEED(aligned(a->dout) && aligned(a->dtable));
    return a->n ? dev->backend->embedding_bwd(dev, a, err) : 0;
}

int mt_op_rmsnorm(mt_device *dev, const struct mt_rmsnorm *a, struct mt_err *err)
{
    const char *op = "rmsnorm";
    NEED(a->c && a->eps >= 0);
    NEED(aligned(a->x) && aligned(a->w) && aligned(a->y) && a->rstd);
    NEED(!a->residual == !a->sum);
    NEED(aligned_or_null(a->residual) && aligned_or_null(a->sum));
    return a->n ? dev->backend->rmsnorm(dev, a, err) : 0;
}

int mt_op_rmsnorm_bwd(mt_device *dev, const struct mt_rmsnorm_bwd *a, struct mt_err *err)
{
    const char *op = "rmsnorm_bwd";
    NEED(a->c);
    NEED(aligned(a->dy) && aligned(a->x) && aligned(a->w) && aligned(a->dx) && a->rstd);
    NEED(aligned_or_null(a->dres));
    NEED(!a->dw || a->workspace);
    return a->n ? dev->backend->rmsnorm_bwd(dev, a, err) : 0;
}

int mt_op_gemm(mt_device *dev, const struct mt_gemm *a, struct mt_err *err)
{
    const char *op = "gemm";
    NEED(a->a && a->b && a->d && a->n && a->k);
    NEED(a->d_dtype == a->dtype || a->d_dtype == MT_F32);
    NEED(a->lda >= (a->trans_a ? a->m : a->k));
    NEED(a->ldb >= (a->trans_b ? a->k : a->n));
    NEED(a->ldd >= a->n && (!a->c || a->ldc >= a->n));
    NEED(a->d != a->a && a->d != a->b);
    NEED(a->c != a->d || a->ldc == a->ldd);
    return a->m ? dev->backend->gemm(dev, a, err) : 0;
}

int mt_op_bias_bwd(mt_device *dev, const struct mt_bias_bwd *a, struct mt_err *err)
{
    const char *op = "bias_bwd";
    NEED(a->c && a->ld >= a->c);
    NEED(aligned(a->dy) && aligned(a->db) && a->workspace);
    return a->n ? dev->backend->bias_bwd(dev, a, err) : 0;
}

int mt_op_qk_rope(mt_device *dev, const struct mt_qk_rope *a, struct mt_err *err)
{
    const char *op = "qk_rope";
    NEED(a->n_q && a->n_kv && a->head_dim && a->rot <= a->head_dim && a->rot % 2 == 0);
    NEED(a->qkv && a->qk && a->positions && a->cos_t && a->sin_t);
    NEED(a->ld_qkv >= (a->n_q + a->n_kv) * a->head_dim && a->ld_qk >= (a->n_q + a->n_kv) * a->head_dim);
    NEED(!a->q_norm == !a->k_norm);
    NEED(!a->q_norm || (a->rstd && a->qk != a->qkv));
    return a->n ? dev->backend->qk_rope(dev, a, err) : 0;
}

int mt_op_qk_rope_bwd(mt_device *dev, const struct mt_qk_rope_bwd *a, struct mt_err *err)
{
    const char *op = "qk_rope_bwd";
    NEED(a->n_q && a->n_kv && a->head_dim && a->rot <= a->head_dim && a->rot % 2 == 0);
    NEED(a->dqk && a->dqkv && a->positions && a->cos_t && a->sin_t);
    NEED(!a->q_norm == !a->k_norm);
    NEED(!a->q_norm || (a->rstd && a->qkv && a->workspace));
    return a->n ? dev->backend->qk_rope_bwd(dev, a, err) : 0;
}

static int check_attention(const struct mt_attention *a, const char *op, struct mt_err *err)
{
    NEED(a->n_q && a->n_kv && a->head_dim && a->n_q % a->n_kv == 0);
    NEED(a->cu_seqlens && a->cu_seqlens_host && a->n_docs);
    NEED(a->q && a->k && a->v && a->o && a->lse && a->workspace);
    NEED(a->ld_q >= a->n_q * a->head_dim && a->ld_o >= a->n_q * a->head_dim);
    NEED(a->ld_k >= a->n_kv * a->head_dim && a->ld_v >= a->n_kv * a->head_dim);
    NEED(a->cu_seqlens_host[0] == 0 && (size_t)a->cu_seqlens_host[a->n_docs] == a->n);
    for (size_t i = 0; i < a->n_docs; i++)
        NEED(a->cu_seqlens_host[i] < a->cu_seqlens_host[i + 1] &&
             (size_t)(a->cu_seqlens_host[i + 1] - a->cu_seqlens_host[i]) <= a->max_len);
    return 0;
}

int mt_op_attention(mt_device *dev, const struct mt_attention *a, struct mt_err *err)
{
    int rc = a->n ? check_attention(a, "attention", err) : 0;
    return rc || !a->n ? rc : dev->backend->attention(dev, a, err);
}

int mt_op_attention_bwd(mt_device *dev, const struct mt_attention_bwd *a, struct mt_err *err)
{
    const char *op = "attention_bwd";
    if (!a->fwd.n)
        return 0;
    int rc = check_attention(&a->fwd, op, err);
    if (rc)
        return rc;
    NEED(a->d_o && a->dq && a->dk && a->dv);
    NEED(a->ld_dq >= a->fwd.n_q * a->fwd.head_dim);
    NEED(a->ld_dk >= a->fwd.n_kv * a->fwd.head_dim && a->ld_dv >= a->fwd.n_kv * a->fwd.head_dim);
    return dev->backend->attention_bwd(dev, a, err);
}

int mt_op_glu(mt_device *dev, const struct mt_glu *a, struct mt_err *err)
{
    const char *op = "glu";
    NEED(a->f && aligned(a->gate_up) && aligned(a->out) && a->gate_up != a->out);
    return a->n ? dev->backend->glu(dev, a, err) : 0;
}

int mt_op_glu_bwd(mt_device *dev, const struct mt_glu_bwd *a, struct mt_err *err)
{
    const char *op = "glu_bwd";
    NEED(a->f && aligned(a->gate_up) && aligned(a->dout) && aligned(a->dgate_up));
    NEED(a->dout != a->dgate_up && (!a->out || (aligned(a->out) && a->out != a->gate_up && a->out != a->dgate_up)));
    return a->n ? dev->backend->glu_bwd(dev, a, err) : 0;
}

int mt_op_cross_entropy(mt_device *dev, const struct mt_cross_entropy *a, struct mt_err *err)
{
    const char *op = "cross_entropy";
    NEED(a->vocab && a->ld >= a->vocab && aligned(a->logits) && a->targets && a->loss);
    NEED(!a->dlogits || a->ld_dlogits >= a->vocab);
    NEED(a->dlogits != (const void *)a->logits || a->ld_dlogits * mt_dtype_size(a->dtype) == a->ld * 4);
    return a->n ? dev->backend->cross_entropy(dev, a, err) : 0;
}

static int check_rows(const struct mt_rows *a, const char *op, struct mt_err *err)
{
    NEED(a->c && a->rows && aligned(a->src) && aligned(a->dst) && a->src != a->dst);
    return 0;
}

int mt_op_gather_rows(mt_device *dev, const struct mt_rows *a, struct mt_err *err)
{
    int rc = check_rows(a, "gather_rows", err);
    return rc || !a->n ? rc : dev->backend->gather_rows(dev, a, err);
}

int mt_op_scatter_rows(mt_device *dev, const struct mt_rows *a, struct mt_err *err)
{
    int rc = check_rows(a, "scatter_rows", err);
    return rc ? rc : dev->backend->scatter_rows(dev, a, err);
}

int mt_op_add(mt_device *dev, const struct mt_add *a, struct mt_err *err)
{
    const char *op = "add";
    NEED(aligned(a->a) && aligned(a->b) && aligned(a->out));
    return a->n ? dev->backend->add(dev, a, err) : 0;
}

int mt_op_grad_cast(mt_device *dev, const struct mt_grad_cast *a, struct mt_err *err)
{
    const char *op = "grad_cast";
    NEED(a->src && a->dst && a->partials);
    NEED((const void *)a->src != a->dst || a->dst_dtype == MT_F32);
    return a->n ? dev->backend->grad_cast(dev, a, err) : 0;
}

int mt_op_join(mt_device *dev, void *buf, size_t n, struct mt_err *err)
{
    const char *op = "join";
    NEED(aligned(buf) && n % MT_JOIN_BLOCK == 0);
    return n ? dev->backend->join(dev, &(struct mt_join){buf, n}, err) : 0;
}

int mt_op_zero(mt_device *dev, void *ptr, size_t bytes, struct mt_err *err)
{
    const char *op = "zero";
    NEED(ptr);
    return bytes ? dev->backend->zero(dev, &(struct mt_zero){ptr, bytes}, err) : 0;
}

int mt_op_cast(mt_device *dev, const struct mt_cast *a, struct mt_err *err)
{
    const char *op = "cast";
    NEED(aligned(a->src) && aligned(a->dst) && a->src != a->dst);
    return a->n ? dev->backend->cast(dev, a, err) : 0;
}

size_t mt_op_rmsnorm_bwd_workspace(mt_device *dev, size_t n, size_t c)
{
    return dev->backend->rmsnorm_bwd_workspace(dev, n, c);
}

size_t mt_op_bias_bwd_workspace(mt_device *dev, size_t n, size_t c)
{
    return dev->backend->bias_bwd_workspace(dev, n, c);
}

size_t mt_op_qk_rope_bwd_workspace(mt_device *dev, size_t n, size_t n_q, size_t n_kv, size_t d)
{
    return dev->backend->qk_rope_bwd_workspace(dev, n, n_q, n_kv, d);
}

size_t mt_op_attention_workspace(mt_device *dev, size_t n, size_t max_len, size_t n_q, size_t n_kv,
                                 size_t d, enum mt_dtype dtype)
{
    return dev->backend->attention_workspace(dev, n, max_len, n_q, n_kv, d, dtype);
}

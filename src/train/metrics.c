/* SPDX-License-Identifier: Apache-2.0 */
#include "train/metrics.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/fs.h"
#include "base/json.h"
#include "base/mem.h"
#include "base/strbuf.h"

struct mt_metrics {
    FILE *f;
    char path[4096];
};

/* The part of the text whose records are of steps up to `step`. */
static void keep_rows(struct mt_str *out, const char *text, size_t len, uint64_t step)
{
    while (len) {
        const char *nl = memchr(text, '\n', len);
        size_t n = nl ? (size_t)(nl - text) + 1 : len;
        cJSON *o = cJSON_ParseWithLength(text, n);
        const cJSON *s = mt_json_get(o, "step");
        if (nl && cJSON_IsNumber(s) && s->valuedouble <= (double)step)
            mt_str_append(out, text, n);
        cJSON_Delete(o);
        text += n;
        len -= n;
    }
}

int mt_metrics_open(struct mt_metrics **out, const char *dir, uint64_t step, struct mt_err *err)
{
    struct mt_metrics *m = mt_calloc(1, sizeof(*m));
    struct mt_str kept = {0};
    char *old = NULL;
    size_t len = 0;
    if (!m)
        return mt_fail_nomem(err, "metrics", sizeof(*m));
    snprintf(m->path, sizeof(m->path), "%.4000s/metrics.jsonl", dir);
    int rc = 0;
    if (mt_path_exists(m->path)) {
        rc = mt_read_file(m->path, &old, &len, err);
        if (!rc && step) /* a run that starts anew starts a new file */
            keep_rows(&kept, old, len, step);
        if (!rc)
            rc = mt_write_file(m->path, kept.p ? kept.p : "", kept.len, err);
    }
    if (!rc && !(m->f = fopen(m->path, "ae")))
        rc = mt_fail(err, MT_ERR_RUNTIME, -errno, "cannot open %s: %s", m->path, strerror(errno));
    free(old);
    mt_str_finish(&kept);
    if (rc) {
        mt_metrics_close(&m);
        return rc;
    }
    *out = m;
    return 0;
}

void mt_metrics_close(struct mt_metrics **m)
{
    if (*m && (*m)->f)
        fclose((*m)->f);
    free(*m);
    *m = NULL;
}

/* {"states": 1234, ...} */
static void add_traffic(cJSON *o, const char *name, const uint64_t bytes[MT_N_DISK_USES])
{
    cJSON *t = cJSON_AddObjectToObject(o, name);
    for (int i = 0; i < MT_N_DISK_USES; i++)
        cJSON_AddNumberToObject(t, mt_disk_use_name((enum mt_disk_use)i), (double)bytes[i]);
}

cJSON *mt_metrics_step_record(const struct mt_step_report *r)
{
    cJSON *o = cJSON_CreateObject();
    const struct mt_step_result *s = &r->result;
    const struct {
        const char *name;
        double v;
    } fields[] = {
        {"step", (double)r->step},
        {"epoch", r->epoch},
        {"tokens", (double)r->total_tokens},
        {"loss_tokens", (double)r->loss_tokens},
        {"loss", s->loss},
        {"lr", r->lr},
        {"grad_norm", s->grad_norm},
        {"clip", (double)s->clip},
        {"tok_s", (double)r->tokens / r->seconds},
        {"loss_tok_s", (double)r->loss_tokens / r->seconds},
        {"t_step", r->seconds},
        {"t_fwd", s->t_forward},
        {"t_bwd", s->t_backward},
        {"t_opt", s->t_adam},
        {"t_wait_h2d", s->t_wait_h2d},
        {"t_data", r->seconds - s->t_step},
        {"h2d_bytes", (double)r->h2d_bytes},
        {"d2h_bytes", (double)r->d2h_bytes},
    };
    for (size_t i = 0; i < MT_ARRAY_LEN(fields); i++)
        cJSON_AddNumberToObject(o, fields[i].name, fields[i].v); /* NaN becomes null */
    if (r->uses_disk) {
        cJSON_AddNumberToObject(o, "t_disk_read", s->t_disk_read);
        cJSON_AddNumberToObject(o, "t_disk_write", s->t_disk_write);
        add_traffic(o, "disk_read", s->traffic.read);
        add_traffic(o, "disk_write", s->traffic.written);
    }
    cJSON_AddBoolToObject(o, "skipped", s->skipped);
    if (s->skipped)
        cJSON_AddStringToObject(o, "bad_tensor", s->bad_tensor);
    return o;
}

cJSON *mt_metrics_eval_record(const struct mt_eval_report *r)
{
    cJSON *o = cJSON_CreateObject();
    cJSON_AddNumberToObject(o, "step", (double)r->step);
    cJSON_AddNumberToObject(o, "eval_loss", r->loss);
    cJSON_AddNumberToObject(o, "eval_ppl", exp(r->loss));
    cJSON_AddNumberToObject(o, "eval_accuracy", r->accuracy);
    cJSON_AddNumberToObject(o, "eval_tokens", (double)r->n_loss);
    return o;
}

int mt_metrics_write(struct mt_metrics *m, const cJSON *record, struct mt_err *err)
{
    char *text = cJSON_PrintUnformatted(record);
    bool ok = text && fprintf(m->f, "%s\n", text) > 0 && !fflush(m->f);
    free(text);
    return ok ? 0
              : mt_fail(err, MT_ERR_RUNTIME, -EIO, "cannot write %s: %s", m->path, strerror(errno));
}

/* SPDX-License-Identifier: Apache-2.0 */
/* plan --optimizers: what each optimizer, and each order of updates, takes on this machine. */
#include <stdio.h>
#include <string.h>

#include "base/json.h"
#include "base/mem.h"
#include "cli.h"
#include "optim/optimizer.h"
#include "plan_print.h"
#include "report.h"

/* lost: what is not as with AdamW in FP32; "": nothing. */
struct variant {
    const char *title, *type, *state_dtype, *master, *lost;
    bool blocks; /* a layer at a time */
};
#define ROUNDS_STATES "rounds moments to 8 bits, in blocks of 32"
#define ROUNDS_24BIT "rounds weights to 24 bits at each update"
#define ROUNDS_BF16 "rounds weights to bf16 by chance"
static const struct variant variants[] = {
    {"adamw f32/f32", "adamw", "f32", "f32", ""},
    {"adamw bf16/f32", "adamw", "bf16", "f32", "rounds moments to 8 bits of mantissa"},
    {"adamw 8bit/f32", "adamw", "8bit", "f32", ROUNDS_STATES},
    {"adamw f32/24bit", "adamw", "f32", "24bit", ROUNDS_24BIT},
    {"adamw 8bit/24bit", "adamw", "8bit", "24bit", "both of the above"},
    {"adamw f32/bf16", "adamw", "f32", "bf16", ROUNDS_BF16},
    {"adamw 8bit/bf16", "adamw", "8bit", "bf16", ROUNDS_BF16 ", moments to 8 bits"},
    {"adamw by blocks", "adamw", "f32", "f32", "a layer at a time (train.blocks = layers); means of all layers", true},
    {"lion bf16/f32", "lion", "bf16", "f32", "another optimizer"},
    {"lion 8bit/f32", "lion", "8bit", "f32", "another optimizer"},
    {"lion 8bit/bf16", "lion", "8bit", "bf16", "another optimizer; " ROUNDS_BF16},
    {"sgd -/f32", "sgd", "f32", "f32", "another optimizer; no state without momentum"},
    {"sgd -/bf16", "sgd", "f32", "bf16", "another optimizer; " ROUNDS_BF16},
    {"adafactor/f32", "adafactor", "f32", "f32", "another optimizer; moments of rows and columns"},
    {"adafactor/bf16", "adafactor", "f32", "bf16", "another optimizer; " ROUNDS_BF16},
    {"apollo/f32", "apollo", "f32", "f32", "another optimizer; moments of a projection to 256 dimensions"},
    {"apollo/bf16", "apollo", "f32", "bf16", "another optimizer; " ROUNDS_BF16},
    {"galore/f32", "galore", "f32", "f32", "another optimizer; moments in 128 dimensions of singular vectors"},
    {"galore/bf16", "galore", "f32", "bf16", "another optimizer; " ROUNDS_BF16},
    {"muon bf16/f32", "muon", "bf16", "f32", "another optimizer; momentum of 8 bits of mantissa"},
};
enum { N_ORDERS = 2 };

struct row {
    const struct variant *of;
    bool backward, fits, exact;
    bool bf16; /* compute: in f32 the masters are what computes, so they keep all their bits */
    bool adapters; /* are trained: not by directions made on the device */
    bool may_block; /* train.blocks can be set */
    char blocks[24]; /* train.blocks */
    double kept, host, disk; /* bytes: a trained parameter's; in all */
    double seconds, written, a_token; /* written: in a step; a_token: for a token */
};

/* What is kept of trained parameters: masters, states and gradients, in any tier. */
static double kept_bytes(const struct mt_plan_choice *c)
{
    static const enum mt_pool_id ring[] = {MT_POOL_GRAD_OUT, MT_POOL_GRAD_OUT_VOCAB, MT_POOL_GRAD_OUT_NORM};
    double sum = 0;
    for (int k = 0; k < MT_N_PLANES; k++) {
        bool trained = k == MT_PLANE_HI || k == MT_PLANE_LO || k == MT_PLANE_GRAD ||
                       (k >= MT_PLANE_STATE && k < MT_PLANE_STATE + MT_MAX_STATES);
        sum += trained ? (double)(c->plane[k].host_bytes + c->plane[k].disk_bytes) : 0;
    }
    for (size_t i = 0; i < MT_ARRAY_LEN(ring); i++)
        sum += c->placement.update == MT_UPDATE_BACKWARD ? (double)c->engine.pool_bytes[ring[i]] : 0;
    return sum;
}

static int take_row(struct row *r, const struct plan_view *v, struct mt_err *err)
{
    const struct mt_plan_choice *c = &v->choice;
    double tokens = (double)(c->numerics.rows_per_step * c->numerics.seq_len);
    r->kept = kept_bytes(c) / (double)MT_MAX(v->layout->n_trained, (uint64_t)1);
    r->host = (double)c->host_bytes;
    r->disk = (double)c->disk_bytes;
    r->seconds = c->sim.seconds;
    r->written = c->sim.bytes[MT_Q_DISK_WRITE];
    if (v->layout->by_blocks) {
        struct plan_blocks b;
        int rc = plan_blocks(&b, v, err);
        if (rc)
            return rc;
        r->seconds = b.seconds;
        r->written = b.written;
    }
    r->a_token = r->written / tokens;
    r->fits = true;
    return 0;
}

/* An error is one that all variants have. That a variant does not fit is none: its row says so. */
static int try_variant(struct row *r, const struct variant *of, bool backward, const struct cli_args *args,
                       struct mt_err *err)
{
    MT_CLOSED_BY(plan_view_close) struct plan_view v = {.cfg = NULL};
    const struct mt_optimizer *o = mt_optimizer_find(of->type, MT_STATE_F32, NULL); /* in any type of states */
    const bool directs = o->direct, rounds = !strcmp(of->state_dtype, "bf16") && !directs; /* rounding as set */
    struct plan_settings s = {
        .key = {"optimizer.type", "optimizer.state_dtype", "optimizer.master", "memory.update",
                rounds ? NULL : "optimizer.rounding"},
        .value = {of->type, of->state_dtype, of->master, backward ? "backward" : "forward", "nearest"}};
    size_t n = rounds ? 4 : 5;
    if (directs) {
        s.key[n] = "train.grad_clip";
        s.value[n] = "0";
    } else if (backward) {
        s.key[n] = "train.clip";
        s.value[n] = "unit";
    }
    for (size_t i = 0; of->blocks && i < MT_ARRAY_LEN(s.key); i++)
        if (!s.key[i]) {
            s.key[i] = "train.blocks";
            s.value[i] = "layers";
            break;
        }
    *r = (struct row){.of = of, .backward = backward};
    int rc = plan_view_open_as(&v, args->n_operands ? args->operands[0] : NULL, args, &s, err);
    r->bf16 = !rc && v.cfg->numerics.dtype != MT_F32;
    r->adapters = !rc && v.cfg->adapter.kind != MT_ADAPTER_NONE;
    r->may_block = !rc && mt_config_may_train_blocks(v.cfg);
    if (!rc)
        snprintf(r->blocks, sizeof(r->blocks), "%s", v.cfg->train.blocks);
    r->exact = !rc && !*of->lost && v.request.numerics.master == MT_MASTER_F32;
    rc = rc ?: plan_view_needs_rates(&v, err)
            ?: mt_resolve(&v.choice, &v.request, err)
            ?: take_row(r, &v, err);
    return rc == -ENOSPC ? 0 : rc;
}

static void print_row(const struct row *r)
{
    const char *order = r->backward ? "backward" : "forward";
    if (!r->fits) {
        printf("  %-16s %-8s does not fit\n", r->of->title, order);
        return;
    }
    printf("  %-16s %-8s %6.3f %7.1f %7.1f %7.4g %7.1f %7.3f %5s\n", r->of->title, order, r->kept,
           r->host * 1e-9, r->disk * 1e-9, r->seconds, r->written * 1e-9, r->a_token * 1e-6,
           r->exact ? "yes" : "no");
}

static void print_notes(void)
{
    printf("\nOptimizers with the types of states and masters (optimizer.type, .state_dtype,\n"
           ".master). kept: bytes a trained parameter of master, states and gradient.\n"
           "written: to drives, GB a step and PB a billion tokens. exact: the steps of AdamW\n"
           "in FP32.\n");
    for (size_t i = 0; i < MT_ARRAY_LEN(variants); i++)
        if (*variants[i].lost)
            printf("  %-16s %s\n", variants[i].title, variants[i].lost);
    printf("backward: --set memory.update=backward, and train.clip=unit, which clips each layer\n"
           "by itself, or train.grad_clip=0; the same bits as forward with that clipping.\n"
           "adafactor, muon, apollo and galore have train.grad_clip=0 in either order.\n");
}

static void add_json(cJSON *all, const struct row *r)
{
    cJSON *o = mt_json_put(NULL, "optimizer.type=%s, optimizer.state_dtype=%s, optimizer.master=%s, memory.update=%s",
                           r->of->type, r->of->state_dtype, r->of->master, r->backward ? "backward" : "forward");
    mt_json_put(o, "train.blocks=%s, exact=%d, fits=%d", r->blocks, r->exact, r->fits);
    if (r->fits) {
        mt_json_put(o, "bytes_per_parameter=%f, host_bytes=%f, disk_bytes=%f, seconds=%f, disk_write_bytes=%f, "
                    "disk_write_bytes_per_token=%f", r->kept, r->host, r->disk, r->seconds, r->written, r->a_token);
    }
    mt_json_append(all, o);
}

static void print_all(const struct row *rows, size_t n, bool json)
{
    if (!json) {
        printf("  optimizer        updates    kept    host  drives  s/step written written exact\n"
               "                               B/par      GB      GB         GB/step PB/Gtok\n");
        for (size_t i = 0; i < n; i++)
            print_row(&rows[i]);
        print_notes();
        return;
    }
    mt_json_begin();
    cJSON *all = cJSON_CreateArray();
    for (size_t i = 0; i < n; i++)
        add_json(all, &rows[i]);
    cli_print_object(all, true);
}

int plan_print_optimizers(const struct cli_args *args, struct mt_err *err)
{
    struct row rows[N_ORDERS * MT_ARRAY_LEN(variants)];
    size_t n = 0;
    int rc = 0;
    for (size_t i = 0; i < MT_ARRAY_LEN(variants) && !rc; i++) {
        /* the first is of AdamW with masters in f32, which any configuration can have */
        const struct mt_optimizer *o = mt_optimizer_find(variants[i].type, MT_STATE_F32, NULL);
        bool possible = (!strcmp(variants[i].master, "f32") || rows[0].bf16) && !(o->direct && rows[0].adapters) &&
                        (!variants[i].blocks || rows[0].may_block);
        for (int backward = 0; possible && backward < N_ORDERS && !rc; backward++)
            rc = try_variant(&rows[n++], &variants[i], backward, args, err);
    }
    if (!rc)
        print_all(rows, n, cli_arg(args, "json"));
    return rc;
}

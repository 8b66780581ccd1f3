/* SPDX-License-Identifier: Apache-2.0 */
#include "rates.h"

#include <math.h>
#include <stdlib.h>

#include "base/clock.h"
#include "base/json.h"
#include "base/mem.h"

/* Some operations run hundreds of times in a step: of so many rounds, one in which the system did something else does
 * not decide about a mean. */
enum { LEAST_ROUNDS = 16, MOST_ROUNDS = 32 };
static const int64_t least_ns = 200000000;

/* --- writing -------------------------------------------------------------------------------------- */

static int write_line(struct cli_rates *r, cJSON *o, struct mt_err *err)
{
    MT_FREED char *text = mt_json_print(o, false);
    bool ok = text && fprintf(r->file, "%s\n", text) > 0;
    cJSON_Delete(o);
    return ok ? 0 : mt_fail(err, MT_ERR_RUNTIME, -EIO, "cannot write the rates between steps");
}

static int write_ops(struct cli_rates *r, const struct mt_metered *ops, struct mt_err *err)
{
    cJSON *o = cJSON_CreateObject(), *list = cJSON_AddArrayToObject(o, "ops");
    for (size_t i = 0; i < r->n; i++) {
        char key[200];
        mt_operation_format(key, sizeof(key), &ops[i]);
        mt_json_append(list, cJSON_CreateString(key));
    }
    return write_line(r, o, err);
}

static int write_rates(struct cli_rates *r, uint64_t step, struct mt_err *err)
{
    int rc = 0;
    int rounds = 0;
    int64_t begin = mt_now_ns();
    while (!rc && rounds < MOST_ROUNDS && (rounds < LEAST_ROUNDS || mt_now_ns() - begin < least_ns))
        rc = mt_turns_run(r->turns, r->rounds + r->n * (size_t)rounds++, err);
    if (rc)
        return rc;
    cJSON *o = cJSON_CreateObject();
    cJSON_AddNumberToObject(o, "step", (double)step);
    mt_turns_mean(r->seconds, r->rounds, r->n, rounds);
    mt_json_add(o, "seconds", cJSON_CreateDoubleArray(r->seconds, (int)r->n));
    return write_line(r, o, err);
}

int cli_rates_open(struct cli_rates *r, const struct mt_setup *s, const char *path, uint64_t step, bool more,
                   struct mt_err *err)
{
    MT_FREED struct mt_metered *ops = NULL;
    struct mt_measure_params p = {.device_kind = mt_device_limits(s->dev[0])->kind,
                                  .device_index = s->device_index,
                                  .n_threads = (int)s->choice.placement.threads,
                                  .cpus = s->cpus};
    *r = (struct cli_rates){0};
    int rc = mt_setup_operations(s, &ops, &r->n, err) ?: MT_NEW(&r->rounds, (MOST_ROUNDS + 1) * r->n, path, err);
    if (!rc && !(r->file = fopen(path, more ? "ae" : "we")))
        rc = mt_fail(err, MT_ERR_RUNTIME, -errno, "cannot write %s: %s", path, strerror(errno));
    r->seconds = rc ? NULL : r->rounds + MOST_ROUNDS * r->n;
    rc = rc ?: mt_turns_create(&r->turns, &p, ops, r->n, err) ?: write_ops(r, ops, err);
    for (int warm = 0; warm < 2 && !rc; warm++)
        rc = mt_turns_run(r->turns, r->rounds, err);
    rc = rc ?: write_rates(r, step, err);
    if (rc)
        cli_rates_close(r, NULL);
    return rc;
}

void cli_rates_step(struct cli_rates *r, uint64_t step)
{
    if (r->file && !r->rc)
        r->rc = write_rates(r, step, &r->err);
}

int cli_rates_close(struct cli_rates *r, struct mt_err *err)
{
    int rc = r->rc;
    if (rc && err)
        *err = r->err;
    if (r->file && fclose(r->file) && !rc)
        rc = mt_fail(err, MT_ERR_RUNTIME, -EIO, "cannot write the rates between steps");
    mt_turns_destroy(&r->turns);
    free(r->rounds);
    *r = (struct cli_rates){0};
    return rc;
}

/* --- reading -------------------------------------------------------------------------------------- */

static bool take_ops(struct rates_log *l, const cJSON *list)
{
    const cJSON *v;
    size_t n = (size_t)cJSON_GetArraySize(list);
    l->ops = mt_calloc(n, sizeof(*l->ops));
    if (!l->ops)
        return false;
    cJSON_ArrayForEach(v, list) if (!cJSON_IsString(v) || !mt_operation_parse(&l->ops[l->n_ops++], v->valuestring))
        return false;
    return n > 0;
}

static bool is_line(const struct rates_log *l, const cJSON *o)
{
    return cJSON_IsNumber(mt_json_get(o, "step")) && cJSON_GetArraySize(mt_json_get(o, "seconds")) >= (int)l->n_ops;
}

int rates_log_read(struct rates_log *out, const char *path, struct mt_err *err)
{
    MT_CLOSED_BY(rates_log_finish) struct rates_log l = {0};
    const cJSON *o;
    bool ok = true, blocks = false;
    int rc = mt_json_read_lines(&l.lines, path, err);
    if (rc)
        return rc;
    cJSON_ArrayForEach(o, l.lines) {
        const cJSON *ops = mt_json_get(o, "ops");
        blocks |= ops && l.ops;
        ok = ok && (ops ? !l.ops && take_ops(&l, ops) : l.ops && is_line(&l, o));
    }
    if (!ok)
        return mt_fail(err, MT_ERR_INPUT, -EINVAL, "%s %s", path,
                       blocks ? "has the rates of several blocks (train.blocks), of which a prediction knows one"
                              : "is not a file of rates between steps");
    *out = MT_GIVE(l);
    return 0;
}

void rates_log_finish(struct rates_log *l)
{
    cJSON_Delete(l->lines);
    free(l->ops);
    *l = (struct rates_log){0};
}

const cJSON *rates_log_after(const struct rates_log *l, int step)
{
    const cJSON *o;
    cJSON_ArrayForEach(o, l->lines)
        if (mt_json_number(o, "step", NAN) == step)
            return mt_json_get(o, "seconds");
    return NULL;
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "bench_share.h"

#include <stdio.h>
#include <string.h>

#include "base/strbuf.h"
#include "config/schema.h"
#include "plan/resolve.h"
#include "train/shared.h"

void bench_share_open(struct bench_share *s, const char *ini, const struct cli_args *args)
{
    *s = (struct bench_share){NULL};
    if (cli_load_file(&s->cfg, ini, args, NULL) || mt_resolve_numerics(&s->numerics, s->cfg, NULL))
        bench_share_finish(s);
}

void bench_share_finish(struct bench_share *s)
{
    mt_config_destroy(&s->cfg);
}

static bool same_text(const struct mt_config *a, const struct mt_config *b, const struct mt_key *key)
{
    MT_STR_FREED struct mt_str x = {0}, y = {0};
    mt_key_print(a, key, &x);
    mt_key_print(b, key, &y);
    bool same = !x.failed && !y.failed && x.len == y.len && (!x.len || !memcmp(x.p, y.p, x.len));
    return same;
}

static const char *alone(const struct bench_share *a)
{
    if (!a->cfg)
        return "its configuration cannot be read";
    if (a->cfg->adapter.kind == MT_ADAPTER_NONE)
        return "it trains no adapters (adapter.kind)";
    return mt_shared_alone(&(struct mt_shared_of){a->cfg, &a->numerics, a->cfg->model.path});
}

const char *bench_share_refusal(const struct bench_share *a, const struct bench_share *b, char *buf, size_t len)
{
    const char *why = alone(a), *key = NULL;
    why = why ? why : alone(b);
    if (why)
        return why;
    for (size_t i = 0; i < mt_n_keys() && !key; i++) {
        const struct mt_key *k = mt_key_at(i);
        if ((k->role == MT_PLACEMENT || k->role == MT_MACHINE) && !same_text(a->cfg, b->cfg, k)) {
            snprintf(buf, len, "%s.%s differs", k->section, k->name);
            return buf;
        }
    }
    key = mt_shared_difference(&(struct mt_shared_of){a->cfg, &a->numerics, a->cfg->model.path},
                               &(struct mt_shared_of){b->cfg, &b->numerics, b->cfg->model.path});
    snprintf(buf, len, "%s differs", key ? key : "");
    return key ? buf : NULL;
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "weights/adapter_keys.h"

#include <stdio.h>
#include <string.h>

#include "base/log.h"
#include "base/mem.h"
#include "base/units.h"
#include "weights/peft.h"

/* "NAME:VALUE" */
static int add_patterns(struct mt_adapter_list *out, const struct mt_cfg_list *list, const char *key,
                        struct mt_err *err)
{
    for (int i = 0; i < list->n; i++) {
        const char *item = list->items[i], *colon = strrchr(item, ':');
        char name[256];
        double value = 0;
        bool rank = !strcmp(key, "rank_pattern");
        if (!colon || colon == item || (size_t)(colon - item) >= sizeof(name) || !mt_parse_real(colon + 1, &value) ||
            value <= 0 || (rank && (value > 4096 || value != (double)(int64_t)value)))
            return mt_fail(err, MT_ERR_USAGE, -EINVAL, "adapter.%s: \"%s\" must be NAME:%s, such as q_proj:32", key, item,
                           rank ? "RANK" : "ALPHA");
        snprintf(name, sizeof(name), "%.*s", (int)(colon - item), item);
        if (!mt_adapter_list_add(out, name, value))
            return mt_fail_nomem(err, key, sizeof(name));
    }
    return 0;
}

static int add_names(struct mt_adapter_list *out, const struct mt_cfg_list *list, struct mt_err *err)
{
    for (int i = 0; i < list->n; i++)
        if (!mt_adapter_list_add(out, list->items[i], 0))
            return mt_fail_nomem(err, "the adapters", sizeof(*out));
    return 0;
}

static int adapters_by_keys(struct mt_adapter_spec *s, const struct mt_config *c, struct mt_err *err)
{
    s->rank = c->adapter.rank;
    s->alpha = c->adapter.alpha;
    s->rslora = c->adapter.rslora;
    s->dora = c->adapter.kind == MT_ADAPTER_DORA;
    return add_names(&s->targets, &c->adapter.targets, err)
        ?: add_names(&s->train_also, &c->adapter.train_also, err)
        ?: add_patterns(&s->ranks, &c->adapter.rank_pattern, "rank_pattern", err)
        ?: add_patterns(&s->alphas, &c->adapter.alpha_pattern, "alpha_pattern", err);
}

int mt_adapters_by_config(struct mt_adapter_spec *out, const struct mt_config *c, const char *resumed,
                          struct mt_err *err)
{
    static const char *const folders[] = {"rank", "alpha", "targets", "rslora", "rank_pattern", "alpha_pattern",
                                          "train_also"};
    char key[64];
    *out = (struct mt_adapter_spec){0};
    if (c->adapter.kind == MT_ADAPTER_NONE)
        return 0;
    for (size_t i = 0; *c->adapter.path && i < MT_ARRAY_LEN(folders); i++) {
        snprintf(key, sizeof(key), "adapter.%s", folders[i]);
        if (!mt_config_is_default(c, key))
            return mt_fail(err, MT_ERR_USAGE, -EINVAL, "%s is set, but the adapters of adapter.path = %s have their own: "
                           "remove the key", key, c->adapter.path);
    }
    int rc = *c->adapter.path ? mt_peft_read_spec(out, resumed ? resumed : c->adapter.path, err)
                              : adapters_by_keys(out, c, err);
    if (!rc && out->dora != (c->adapter.kind == MT_ADAPTER_DORA))
        rc = mt_fail(err, MT_ERR_USAGE, -EINVAL, "adapter.kind must be %s, like the adapters of adapter.path = %s",
                     out->dora ? "dora" : "lora", c->adapter.path);
    out->on = true;
    out->merge = c->adapter.merge_aware;
    out->merge_scale = c->adapter.merge_scale;
    out->lr_ratio_b = c->adapter.lr_ratio_b;
    if (!rc && *c->adapter.path && !resumed && out->dropout != c->adapter.dropout)
        mt_info("the adapters of %s were trained with dropout %g, adapter.dropout is %g", c->adapter.path, out->dropout,
                c->adapter.dropout);
    out->dropout = c->adapter.dropout;
    return rc;
}

static void print_items(struct mt_str *out, const struct mt_adapter_list *l, bool values)
{
    for (size_t i = 0; i < l->n; i++) {
        mt_str_printf(out, "%s%s", i ? ", " : "", l->items[i].name);
        if (values)
            mt_str_printf(out, ":%.17g", l->items[i].value);
    }
    mt_str_append(out, "", 0); /* "" rather than NULL */
}

int mt_adapters_spell_out(struct mt_config *c, const char *resumed, struct mt_err *err)
{
    struct mt_adapter_spec s;
    char rank[32], alpha[32];
    struct mt_str list[4] = {{0}};
    if (!*c->adapter.path)
        return 0;
    int rc = mt_adapters_by_config(&s, c, resumed, err);
    if (rc)
        return rc;
    snprintf(rank, sizeof(rank), "%lld", (long long)s.rank);
    snprintf(alpha, sizeof(alpha), "%.17g", s.alpha);
    print_items(&list[0], &s.targets, false);
    print_items(&list[1], &s.train_also, false);
    print_items(&list[2], &s.ranks, true);
    print_items(&list[3], &s.alphas, true);
    const struct {
        const char *key, *value;
    } keys[] = {{"adapter.path", ""},           {"adapter.rank", rank},
                {"adapter.alpha", alpha},       {"adapter.rslora", s.rslora ? "on" : "off"},
                {"adapter.targets", list[0].p}, {"adapter.train_also", list[1].p},
                {"adapter.rank_pattern", list[2].p}, {"adapter.alpha_pattern", list[3].p}};
    for (size_t i = 0; i < MT_ARRAY_LEN(list) && !rc; i++)
        rc = list[i].failed ? mt_fail_nomem(err, "adapters", list[i].len) : 0;
    for (size_t i = 0; i < MT_ARRAY_LEN(keys) && !rc; i++)
        rc = mt_config_override(c, keys[i].key, keys[i].value, "adapter.path", err);
    for (size_t i = 0; i < MT_ARRAY_LEN(list); i++)
        mt_str_finish(&list[i]);
    mt_adapter_spec_finish(&s);
    return rc;
}

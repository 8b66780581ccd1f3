/* SPDX-License-Identifier: Apache-2.0 */
/* megatrain plan --prices: what plans take times from, and where each rate is from. */
#include <stdio.h>

#include "base/mem.h"
#include "plan_print.h"
#include "report.h"

static const char *kind_of(const struct mt_price *p)
{
    return p->rate.source == MT_RATE_MEASURED ? "measured" : "rated";
}

static int print_as_json(const struct mt_machine *m, const struct mt_price *all, size_t n)
{
    cJSON *o = cJSON_CreateObject(), *list;
    cJSON_AddStringToObject(o, "machine", m->name);
    list = cJSON_AddArrayToObject(o, "prices");
    for (size_t i = 0; i < n; i++)
        mt_json_append(list, mt_json_put(NULL, "key=%s, value=%f, unit=%s, kind=%s, from=%s", all[i].key,
                                         all[i].rate.value, all[i].unit, kind_of(&all[i]), all[i].from));
    return cli_print_object(o, true);
}

static void print_table(const struct mt_machine *m, const struct mt_price *all, size_t n)
{
    printf("%s\n\n%-28s %8s  %-8s %-9s %s\n", m->name, "Price", "value", "unit", "", "source");
    for (size_t i = 0; i < n; i++)
        printf("%-28s %8.5g  %-8s %-9s %s\n", all[i].key, all[i].rate.value, all[i].unit, kind_of(&all[i]),
               all[i].from[0] ? all[i].from : all[i].rate.source == MT_RATE_MEASURED ? "megatrain probe" : "its file does not say");
    printf("\n%s", mt_machine_rules);
    int others = 0;
    for (int i = 0; i < m->n_updates; i++)
        others += m->updates[i].name[0] != 0;
    if (m->n_samples || others)
        printf("Measured besides, and taken before these: %zu operations, %d updates of other optimizers.\n", m->n_samples, others);
}

int plan_print_prices(const struct cli_args *args, struct mt_err *err)
{
    MT_CLOSED_BY(mt_machine_finish) struct mt_machine m = {0};
    size_t n = 0;
    if (!cli_arg(args, "machine"))
        return cli_usage("plan: --prices needs --machine: a name (plan --list), or the file of a machine that was measured");
    int rc = plan_read_machine(&m, args, err);
    if (rc)
        return rc;
    MT_FREED struct mt_price *all = mt_machine_prices(&m, &n);
    if (!all)
        return mt_fail_nomem(err, "the prices", sizeof(*all));
    if (cli_arg(args, "json"))
        return print_as_json(&m, all, n);
    print_table(&m, all, n);
    return 0;
}

/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>

#include "base/mem.h"
#include "report/report_priv.h"

int mt_report_add(struct mt_report *r, const char *section, const char *name, struct mt_str *content,
                  struct mt_err *err)
{
    if (content->failed || !mt_grow(&r->panels, &r->cap, r->n + 1, sizeof(*r->panels))) {
        mt_str_finish(content);
        return mt_fail_nomem(err, "a report", content->len);
    }
    struct mt_panel *p = &r->panels[r->n++];
    *p = (struct mt_panel){.content = content->p};
    snprintf(p->section, sizeof(p->section), "%s", section);
    snprintf(p->name, sizeof(p->name), "%s", name);
    *content = (struct mt_str){0};
    return 0;
}

void mt_report_finish(struct mt_report *r)
{
    for (size_t i = 0; i < r->n; i++)
        free(r->panels[i].content);
    free(r->panels);
    *r = (struct mt_report){0};
}

/* SPDX-License-Identifier: Apache-2.0 */
#include "json_line.h"

#include <stdio.h>
#include <time.h>

#include "base/json.h"
#include "base/mem.h"

static void put(cJSON *o)
{
    MT_FREED char *text = mt_json_print(o, false);
    if (text)
        fprintf(stderr, "%s\n", text);
    cJSON_Delete(o);
}

void cli_json_line(enum mt_log_level level, const char *line)
{
    static const char *const names[] = {"error", "warning", "info", "debug", "progress"};
    cJSON *o = cJSON_CreateObject();
    mt_json_put(o, "time=%f, level=%s, message=%s", (double)time(NULL), names[level], line);
    put(o);
}

void cli_json_event(const char *event, cJSON *fields)
{
    cJSON *o = cJSON_CreateObject();
    mt_json_put(o, "time=%f, level=%s, event=%s", (double)time(NULL), "info", event);
    while (fields && fields->child) {
        cJSON *v = fields->child;
        cJSON_DetachItemViaPointer(fields, v);
        mt_json_add(o, v->string, v);
    }
    cJSON_Delete(fields);
    put(o);
}

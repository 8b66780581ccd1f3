/* SPDX-License-Identifier: Apache-2.0 */
#include "json_line.h"

#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "base/json.h"

void cli_json_line(enum mt_log_level level, const char *line)
{
    static const char *const names[] = {"error", "warning", "info", "debug", "progress"};
    cJSON *o = cJSON_CreateObject();
    cJSON_AddNumberToObject(o, "time", (double)time(NULL));
    cJSON_AddStringToObject(o, "level", names[level]);
    cJSON_AddStringToObject(o, "message", line);
    char *text = mt_json_print(o, false);
    if (text)
        fprintf(stderr, "%s\n", text);
    free(text);
    cJSON_Delete(o);
}

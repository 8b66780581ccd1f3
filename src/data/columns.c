/* SPDX-License-Identifier: Apache-2.0 */
#include "data/columns.h"

#include <stdio.h>
#include <string.h>

static const char FIELDS[] = " messages conversations prompt completion chosen rejected label instruction input output "
                             "system history tools text input_ids labels attention_mask chat_template_kwargs prompt_ids "
                             "completion_ids chosen_ids rejected_ids token_ids mask completion_mask logprobs old_logprobs "
                             "ref_logprobs advantage reward group temperature logprobs_temperature truncated ";

/* "FIELD:COLUMN"; returns the column, NULL: it is not of this form. */
static const char *divide(char *field, size_t len, const char *item)
{
    const char *colon = strchr(item, ':');
    size_t n = colon ? (size_t)(colon - item) : 0;
    if (!n || n >= len || !colon[1])
        return NULL;
    memcpy(field, item, n);
    field[n] = 0;
    return colon + 1;
}

static bool is_field(const char *name)
{
    char word[40];
    snprintf(word, sizeof(word), " %s ", name);
    return !strchr(name, ' ') && strstr(FIELDS, word);
}

int mt_columns_check(const struct mt_cfg_list *columns, struct mt_err *err)
{
    for (int i = 0; i < columns->n; i++) {
        char field[32], other[32];
        const char *column = divide(field, sizeof(field), columns->items[i]);
        if (!column)
            return mt_fail(err, MT_ERR_USAGE, -EINVAL, "data.columns: \"%s\" is not FIELD:COLUMN, such as prompt:question",
                           columns->items[i]);
        if (!is_field(field))
            return mt_fail(err, MT_ERR_USAGE, -EINVAL, "data.columns: \"%s\" is no field of a format; these are%s (before the "
                           "colon is the name here, after it yours)", field, FIELDS);
        for (int k = 0; k < i; k++) {
            const char *before = divide(other, sizeof(other), columns->items[k]);
            if (!strcmp(field, other) || !strcmp(column, before))
                return mt_fail(err, MT_ERR_USAGE, -EINVAL, "data.columns: \"%s\" and \"%s\" name the same twice",
                               columns->items[k], columns->items[i]);
        }
    }
    return 0;
}

void mt_columns_rename(cJSON *record, const struct mt_cfg_list *columns)
{
    enum { MOST = sizeof(FIELDS) / 2 };
    cJSON *found[MOST] = {NULL};
    char field[32];
    if (!columns || !cJSON_IsObject(record))
        return;
    for (int i = 0; i < columns->n; i++) { /* all first: two names may be exchanged */
        const char *column = divide(field, sizeof(field), columns->items[i]);
        found[i] = column ? cJSON_DetachItemFromObjectCaseSensitive(record, column) : NULL;
    }
    for (int i = 0; i < columns->n; i++)
        if (found[i] && divide(field, sizeof(field), columns->items[i])) {
            cJSON_DeleteItemFromObjectCaseSensitive(record, field);
            mt_json_add(record, field, found[i]);
        }
}

cJSON *mt_columns_json(const struct mt_cfg_list *columns)
{
    cJSON *o = cJSON_CreateObject();
    char field[32];
    for (int i = 0; i < columns->n; i++) {
        const char *column = divide(field, sizeof(field), columns->items[i]);
        if (column)
            cJSON_AddStringToObject(o, field, column);
    }
    return o;
}

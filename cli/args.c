/* SPDX-License-Identifier: Apache-2.0 */
/* Options as they were given, and that they cannot be so. */
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/units.h"
#include "cli.h"

const char *cli_arg(const struct cli_args *a, const char *name)
{
    for (size_t i = a->n_given; i-- > 0;)
        if (!strcmp(a->given[i].option->name, name))
            return a->given[i].value ? a->given[i].value : "";
    return NULL;
}

int64_t cli_whole(const struct cli_args *a, const char *name, int64_t def)
{
    const char *text = cli_arg(a, name);
    if (text)
        mt_parse_count(text, &def);
    return def;
}

double cli_real(const struct cli_args *a, const char *name, double def)
{
    const char *text = cli_arg(a, name);
    if (text)
        mt_parse_real(text, &def);
    return def;
}

uint64_t cli_size(const struct cli_args *a, const char *name, uint64_t def)
{
    const char *text = cli_arg(a, name);
    if (text)
        mt_parse_bytes(text, &def);
    return def;
}

void cli_args_finish(struct cli_args *a)
{
    free(a->given);
    a->given = NULL;
    a->n_given = a->cap_given = 0;
}

int cli_usage(const char *fmt, ...)
{
    va_list ap;
    va_start(ap, fmt);
    fprintf(stderr, "megatrain ");
    vfprintf(stderr, fmt, ap);
    fprintf(stderr, "\n");
    va_end(ap);
    return EXIT_USAGE;
}

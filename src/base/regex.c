/* SPDX-License-Identifier: Apache-2.0 */
/* PCRE2 reads expressions as Python does: \d, lazy repeats and assertions, which POSIX's do not
 * have. */
#define PCRE2_CODE_UNIT_WIDTH 8
#include "base/regex.h"

#include <errno.h>
#include <pcre2.h>
#include <stdio.h>
#include <string.h>

int mt_regex_begins(bool *yes, const char *expression, const char *text, char why[MT_REGEX_WHY])
{
    int code;
    size_t at;
    *yes = false;
    pcre2_code *re = pcre2_compile((PCRE2_SPTR)expression, PCRE2_ZERO_TERMINATED, PCRE2_ANCHORED,
                                   &code, &at, NULL);
    if (!re) {
        pcre2_get_error_message(code, (PCRE2_UCHAR *)why, MT_REGEX_WHY);
        return code == PCRE2_ERROR_HEAP_FAILED ? -ENOMEM : -EINVAL;
    }
    pcre2_match_data *match = pcre2_match_data_create_from_pattern(re, NULL);
    int n = match ? pcre2_match(re, (PCRE2_SPTR)text, strlen(text), 0, 0, match, NULL)
                  : PCRE2_ERROR_NOMEMORY;
    pcre2_match_data_free(match);
    pcre2_code_free(re);
    *yes = n >= 0;
    if (n >= 0 || n == PCRE2_ERROR_NOMATCH)
        return 0;
    bool memory = n == PCRE2_ERROR_NOMEMORY;
    snprintf(why, MT_REGEX_WHY, "%s", memory ? "no memory" : "it goes back and forth for too long");
    return memory ? -ENOMEM : -ERANGE;
}

/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "base/strbuf.h"
#include "cli.h"

/** The file that `config init` prints: a table of lines by task, and over it what was found out. */
enum { INIT_SFT = 1, INIT_LORA = 2, INIT_QLORA = 4, INIT_DPO = 8, INIT_PRETRAIN = 16, INIT_BLOCKS = 32 };
#define INIT_ADAPTERS (INIT_LORA | INIT_QLORA | INIT_DPO)
#define INIT_EVERY (INIT_SFT | INIT_ADAPTERS | INIT_PRETRAIN | INIT_BLOCKS)

struct init_task {
    const char *name;
    unsigned task; /* one of INIT_... */
    const char *does;
};
/** -EINVAL (MT_ERR_USAGE): there is none of that name; NULL: sft. */
int init_task_named(const struct init_task **out, const char *name, struct mt_err *err);

enum { INIT_MAX_SET = 48, INIT_WIDTH = 78 };
struct init_lines {
    const struct init_task *task;
    struct {
        char key[64], *value, why[INIT_WIDTH];
        bool printed;
    } set[INIT_MAX_SET];
    int n;
    char data[160];  /* a sentence of the data for the file's head; "" */
    bool no_memory;
};

/** Gives "section.key" this value and reason ("": the table's). A key that the task has no line for gets one. */
void init_set(struct init_lines *f, const char *key, const char *value, const char *why, ...)
    __attribute__((format(printf, 4, 5)));
/** The same with a number, in Ki where it is whole. */
void init_set_number(struct init_lines *f, const char *key, uint64_t value, const char *why);
/** Forgets the keys set after the first n; or the one key. */
void init_unset(struct init_lines *f, int n);
void init_drop(struct init_lines *f, const char *key);
/** What a key was set to, or `def`. */
const char *init_value(const struct init_lines *f, const char *key, const char *def);
/** All lines as options --set, and after them `others`, each "section.key=value", to a NULL; NULL: none. false: out of
 * memory. Finish with init_finish_options(). */
bool init_options(struct cli_args *out, struct init_lines *f, const char *const *others);
void init_finish_options(struct cli_args *a);
void init_print(struct mt_str *out, struct init_lines *f);

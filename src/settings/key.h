/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stddef.h>

enum mt_key_type {
    MT_KEY_STRING,
    MT_KEY_TEXT,     /* char[MT_OFFLOAD_TEXT]; "auto" is empty */
    MT_KEY_PATH,     /* a string; relative to the file that sets it */
    MT_KEY_NAME_OR_FILE, /* one of `choices`, a number or a share; else a file */
    MT_KEY_NAME_OR_PATH, /* the default, which is a name; else a path if it exists, relative to the file that sets it */
    MT_KEY_LIST,
    MT_KEY_PATHS,    /* a list of paths */
    MT_KEY_NAMED_PATHS, /* a list of NAME:PATH; names of at most 40 letters, digits, _ and -, each once */
    MT_KEY_CHOICE,   /* an enum, in the order of `choices` */
    MT_KEY_WORD,     /* a string, one of `choices` */
    MT_KEY_DTYPE,    /* enum mt_dtype, by name one of `choices`; "auto" = MT_DTYPE_AUTO */
    MT_KEY_BOOL,
    MT_KEY_COUNT,    /* int64_t; k, M, Ki, Mi. A number may be empty (0), or "auto" (MT_AUTO), if the default is */
    MT_KEY_REAL,
    MT_KEY_WHOLE,    /* double, a whole number; k, M, Ki, Mi */
    MT_KEY_AMOUNT,   /* struct mt_cfg_amount: a count or N% */
    MT_KEY_SIZE,     /* struct mt_size: bytes with unit, N%, auto */
    MT_KEY_BYTES,    /* uint64_t: bytes with unit */
    MT_KEY_DURATION, /* double seconds: 30m, 12h, 0 */
    MT_KEY_INTERVAL, /* struct mt_cfg_interval: steps or a duration */
};

/**
 * What a key may do to a run. This alone decides what a resume may change, what it takes from the checkpoint, and which
 * resolved values are written back into the configuration.
 */
enum mt_key_role {
    MT_NUMERICS,  /* may change bits: a resume refuses another value, and takes the checkpoint's for auto. A new key
                     must default to what versions without it did */
    MT_HELD_OUT,  /* numerics as a number or a share of the training's samples; else output: another file may be named */
    MT_RELEASED,  /* numerics, but a resume may set the default */
    MT_LENGTH,    /* numerics, but a resume may make the run longer */
    MT_PLACEMENT, /* where things are: may change; what auto became is written back */
    MT_MACHINE,   /* what placement may use of the machine: may change; not written back, since machines differ */
    MT_OUTPUT,    /* what is written, and when: may change */
};

#define MT_KEY_NO_OFFSET SIZE_MAX

/** One key. The table in config/schema.c and the keys of optimizers describe the INI format completely. */
struct mt_key {
    const char *section, *name;
    enum mt_key_role role;
    enum mt_key_type type;
    size_t offset; /* into struct mt_config; MT_KEY_NO_OFFSET: an optimizer's own (optim/optimizer.h) */
    const char *def;
    const char *choices;     /* "a|b|c" for MT_KEY_CHOICE, MT_KEY_WORD, MT_KEY_DTYPE and MT_KEY_NAME_OR_FILE */
    double min, max;         /* bounds of numbers; min > max: none */
    const char *unsupported; /* values, "a|b", that are refused as not supported yet; "*": all */
    const char *help;
    const char *instead;     /* of an unsupported value: what to set; NULL: it is only not supported yet */
};

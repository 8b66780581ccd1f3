/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "base/json.h"
#include "checkpoint/vfs.h"
#include "hf/source.h"

/** Called after each file is written. */
typedef int (*mt_file_done)(void *ctx, const char *name, const struct mt_out_file *f,
                            struct mt_err *err);

/**
 * The small files of a model's folder that are copied with its weights (configuration, tokenizer, code, licence), in memory.
 * Only regular files of up to 256 MiB, and links to such files in the folder or among the hub cache's blobs: others are
 * left out with a warning. Without config.json there is an error (an adapter's folder has none).
 */
struct mt_hf_files {
    struct mt_hf_file {
        char name[288];
        char *text; /* terminated by NUL */
        size_t len;
    } *p;
    size_t n;
};
int mt_hf_files_read(struct mt_hf_files *out, const char *model_dir, struct mt_err *err);
void mt_hf_files_finish(struct mt_hf_files *f);
/**
 * Makes `text` the files' chat template (chat_template.jinja) if they have none, or another one: then that is left out,
 * also of tokenizer_config.json, with those beside it (additional_chat_templates/), and *other is true.
 */
int mt_hf_files_set_template(struct mt_hf_files *f, const char *text, bool *other, struct mt_err *err);

/**
 * Writes a Hugging Face folder, which must exist and be empty: of a model, or of an adapter (model/peft.h), with one
 * file of weights and the model's tokenizer, but not its configuration.
 */
struct mt_hf_dir {
    const struct mt_vfs *vfs;
    const char *dir, *model_dir; /* model_dir: its other files are copied if there are no */
    const struct mt_hf_files *files; /* read earlier */
    const struct mt_source *sources; /* [n_sources] its tensors, in the order of writing */
    size_t n_sources;
    const char *const *named;    /* [n_named] tensors that stay in base_dir's files: they are in the index, so that no
                                    program takes the folder for a complete model */
    size_t n_named;
    const char *base_dir;
    const char *torch_dtype;     /* written to config.json, "bfloat16" or "float32" */
    const char *quantization;    /* quantization_config, see checkpoint/quantization.h; NULL: unchanged */
    uint64_t shard_bytes;
    const char *adapter_config;  /* for an adapter: the text of adapter_config.json; NULL: a model */
    cJSON *listed;               /* receives each file with its sums (mt_manifest_add_file()); NULL: not wanted */
    mt_file_done done;           /* may be NULL */
    void *ctx;
};
int mt_hf_dir_write(const struct mt_hf_dir *h, struct mt_err *err);
/** One safetensors file, of other sources. */
int mt_hf_write_file(const struct mt_hf_dir *h, const char *name, const struct mt_source *s, size_t n,
                     struct mt_err *err);

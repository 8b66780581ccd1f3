/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/fs.h"
#include "base/philox.h"
#include "model/layout.h"
#include "model/ranges.h"

/** A small layout with random planes, and a folder whose config.json is its model's. */
struct made_model {
    struct mt_layout *layout;
    mt_plane_set *planes;
    char dir[64], model_dir[80];
};

static const char made_config[] =
    "{\"architectures\": [\"Qwen3ForCausalLM\"], \"hidden_size\": 16, \"intermediate_size\": 24,\n"
    " \"num_hidden_layers\": 2, \"num_attention_heads\": 2, \"num_key_value_heads\": 1, \"head_dim\": 8,\n"
    " \"vocab_size\": 40, \"torch_dtype\": \"float32\"}\n";

static inline void made_fill(const struct made_model *m, uint64_t seed)
{
    for (size_t i = 0; i < m->layout->n_tensors; i++) {
        const struct mt_tensor *t = &m->layout->tensors[i];
        uint16_t *hi = mt_plane(m->planes, t->unit, MT_PLANE_HI);
        uint16_t *lo = mt_plane(m->planes, t->unit, MT_PLANE_LO);
        float *mm = mt_plane(m->planes, t->unit, MT_PLANE_STATE), *v = mt_plane(m->planes, t->unit, MT_PLANE_STATE + 1);
        for (size_t k = t->first; k < t->first + t->n; k++) {
            float w = (float)mt_philox_uniform(seed, i, k) - 0.5f;
            mt_master_split(w, &hi[k], &lo[k]);
            mm[k] = (float)mt_philox_uniform(seed + 1, i, k);
            v[k] = (float)mt_philox_uniform(seed + 2, i, k);
        }
    }
}

static inline int made_model_init(struct made_model *m)
{
    static struct mt_hf_config cfg;
    snprintf(m->dir, sizeof(m->dir), "/tmp/mt-test-XXXXXX");
    if (!mkdtemp(m->dir))
        return -1;
    snprintf(m->model_dir, sizeof(m->model_dir), "%s/model", m->dir);
    char path[128];
    snprintf(path, sizeof(path), "%s/config.json", m->model_dir);
    if (mt_mkdir_p(m->model_dir, NULL) || mt_write_file(path, made_config, strlen(made_config), NULL) ||
        mt_hf_config_read(&cfg, m->model_dir, NULL) ||
        mt_layout_create(&m->layout, &cfg, &(struct mt_layout_params){.decay_embeddings = true, .cut = mt_cut_layer},
                         NULL))
        return -1;
    struct mt_plane_set_params p;
    if (mt_layout_plane_params(&p, m->layout, &mt_adamw, MT_BF16, NULL))
        return -1;
    int rc = mt_plane_set_create(&m->planes, &p, NULL);
    free(p.elems);
    if (rc)
        return -1;
    made_fill(m, 1);
    return 0;
}

static inline void made_model_finish(struct made_model *m)
{
    mt_plane_set_destroy(&m->planes);
    mt_layout_destroy(&m->layout);
    mt_remove_tree(m->dir, NULL);
}

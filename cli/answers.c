/* SPDX-License-Identifier: Apache-2.0 */
#include "answers.h"

#include "base/clock.h"
#include "base/fs.h"
#include "rounds.h"

int cli_answers_open(struct cli_answers *a, struct mt_config *cfg, struct mt_inputs *in, struct mt_err *err)
{
    struct cli_generation *g = &a->g;
    *g = (struct cli_generation){
        .cfg = cfg, .file = cfg->eval.generate, .samples = 1, .noise = -1};
    g->g = (struct mt_generation){.n_new = (size_t)cfg->eval.generate_tokens, .top_p = 1};
    g->prompts = cJSON_CreateArray();
    int rc = g->prompts ? cli_read_prompts(g, err) : mt_fail_nomem(err, g->file, 1);
    const cJSON *o;
    cJSON_ArrayForEach(o, g->prompts) g->chat |= mt_json_get(o, "messages") != NULL;
    rc = rc ?: cli_check_rewards(cfg, g->file, g->prompts, err)
            ?: cli_encode_prompts(g, err)
            ?: cli_draw_bytes(g, &in->hf, err);
    if (!rc && g->longest + g->g.n_new > (size_t)cfg->numerics.seq_len)
        rc = mt_fail(err, MT_ERR_USAGE, -EINVAL, "%s: the longest prompt has %zu tokens, which with eval.generate_tokens = %zu are more than "
                     "data.seq_len = %lld: shorten one of them", g->file, g->longest, g->g.n_new, (long long)cfg->numerics.seq_len);
    in->n_answers = g->n;
    in->answer_len = g->longest + g->g.n_new;
    return rc;
}

int cli_answer(void *answers, struct mt_eval_report *r, struct mt_err *err)
{
    struct cli_answers *a = answers;
    struct cli_rewards told;
    int64_t began = mt_now_ns();
    int rc = MT_AGAIN;
    const char *drawn = MT_PATH("%s/answers.tmp.jsonl", a->dir);
    const char *whole = MT_PATH("%s/answers-%llu.jsonl", a->dir, (unsigned long long)r->step);
    const char *newest = MT_PATH("%s/answers.jsonl", a->dir);
    while (rc == MT_AGAIN)
        rc = mt_train_heed(a->control, a->learner, 1, 1, cli_write_texts(&a->g, drawn, err), err);
    rc = rc ?: cli_give_rewards(a->g.cfg, drawn, whole, &told, err)
            ?: cli_link_as(newest, whole, err);
    if (rc)
        return rc;
    r->n_answers = told.n;
    r->seconds += mt_seconds_since(began);
    if (a->g.cfg->policy.reward[0])
        r->reward = told.sum / (double)told.n;
    return 0;
}

void cli_answers_finish(struct cli_answers *a)
{
    a->g.cfg = NULL; /* the run's */
    cli_generation_finish(&a->g);
}

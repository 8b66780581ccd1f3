/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A step that several hosts share, which are threads here: every host has the bits of a process alone, in its losses, its
 * norms and its weights. A host that is lost ends the others.
 */
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/fs.h"
#include "base/mem.h"
#include "base/philox.h"
#include "engine/engine.h"
#include "kinds/kinds.h"
#include "model/ranges.h"
#include "net_threads.h"
#include "test.h"
#include "weights/weights.h"

enum { TOKENS = 20, MICRO = 8, STEPS = 4, MOST_HOSTS = 4, MOST_LANES = 2, DEVICE_BYTES = 4 << 20 };

static const char model_config[] =
    "{\"architectures\": [\"LlamaForCausalLM\"], \"hidden_size\": 32, \"intermediate_size\": 40,\n"
    " \"num_hidden_layers\": 3, \"num_attention_heads\": 2, \"num_key_value_heads\": 1, \"head_dim\": 16,\n"
    " \"vocab_size\": 96, \"tie_word_embeddings\": %s, \"torch_dtype\": \"float32\"}\n";

/* Micro-batches of each step: the second is short, so that the last hosts have nothing of it but gradients to add up. */
static const size_t micro_of[STEPS] = {MICRO, 1, MICRO - 1, MICRO};

/* What is trained, and how it is placed: the same for all hosts. */
struct setting {
    struct mt_hf_config cfg;
    enum mt_dtype dtype, grad;
    struct mt_placement placement;
    int hosts;
    int lost; /* the host that makes no second step, or -1 */
};

/* What a host has at the end. */
struct outcome {
    double loss[STEPS], norm[STEPS], eval;
    int rc;
    struct mt_err err;
    bool whole, asked;
    float *masters;
    size_t n;
};

struct host {
    const struct setting *s;
    struct outcome *o;
    mt_net *net;
    int number;
    pthread_t thread;
};

static char root[64];

static int set_up(void **)
{
    alarm(200);
    snprintf(root, sizeof(root), "/tmp/mt-hosts-XXXXXX");
    return mkdtemp(root) ? 0 : -1;
}

static int tear_down(void **)
{
    return mt_remove_tree(root, NULL);
}

static void read_config(struct mt_hf_config *cfg, bool tied)
{
    char path[96], text[sizeof(model_config) + 8];
    snprintf(path, sizeof(path), "%s/config.json", root);
    snprintf(text, sizeof(text), model_config, tied ? "true" : "false");
    assert_int_equal(mt_write_file(path, text, strlen(text), NULL), 0);
    assert_int_equal(mt_hf_config_read(cfg, root, NULL), 0);
}

static int make_step(struct mt_step_data *d, struct mt_batch *micro, size_t n, uint64_t step)
{
    int rc = 0;
    *d = (struct mt_step_data){.micro = micro, .cap = MICRO, .n = n, .step = step};
    for (size_t m = 0; m < n; m++) {
        uint32_t ids[TOKENS];
        for (size_t i = 0; i < TOKENS; i++)
            ids[i] = (uint32_t)(mt_philox_uniform(step, m, i) * 96);
        rc |= mt_batch_init(&micro[m], TOKENS, 2, NULL);
        rc |= mt_batch_add(&micro[m], ids, NULL, 7 + m, 0, NULL);
        rc |= mt_batch_add(&micro[m], ids + 7 + m, NULL, TOKENS - 7 - m, 1, NULL);
        mt_batch_seal(&micro[m]);
        d->n_tokens += micro[m].n_tokens;
        d->n_loss += micro[m].n_loss;
    }
    return rc;
}

static void free_step(struct mt_step_data *d)
{
    for (size_t m = 0; m < d->n; m++)
        mt_batch_finish(&d->micro[m]);
}

static int step(mt_engine *e, const struct host *h, int i)
{
    struct mt_step_data d;
    struct mt_batch micro[MICRO];
    struct mt_step_result res = {0};
    struct outcome *o = h->o;
    int rc = make_step(&d, micro, micro_of[i], (uint64_t)i);
    const struct mt_learner_step of = {&d, 1e-2};
    if (h->net && i == STEPS - 1 && h->number == h->s->hosts - 1) /* the last host hears of it, and tells the others */
        mt_engine_interrupt(e);
    if (!rc)
        rc = mt_engine_step(e, &of, &res, &o->err);
    o->loss[i] = res.loss;
    o->norm[i] = res.grad_norm;
    free_step(&d);
    return rc;
}

static int evaluate(mt_engine *e, struct outcome *o)
{
    struct mt_step_data d;
    struct mt_batch micro[MICRO];
    struct mt_eval_result res = {0};
    int rc = make_step(&d, micro, MICRO - 2, 40);
    if (!rc)
        rc = mt_engine_eval(e, 0, &d, &res, &o->err);
    o->eval = res.loss_sum;
    free_step(&d);
    return rc;
}

static int read_masters(struct outcome *o, const struct mt_layout *l, mt_plane_set *planes)
{
    int rc = 0;
    for (size_t i = 0; i < l->n_tensors; i++)
        o->n += l->tensors[i].n;
    o->masters = mt_calloc(o->n, sizeof(float));
    for (size_t i = 0, at = 0; i < l->n_tensors && !rc; at += l->tensors[i++].n)
        rc = mt_tensor_read_masters(planes, &l->tensors[i], 0, l->tensors[i].n, o->masters + at, &o->err);
    return rc;
}

static int train(mt_engine *e, const struct host *h)
{
    int rc = 0;
    for (int i = 0; i < STEPS && !rc; i++) {
        if (i == 1 && h->number == h->s->lost)
            return 0;
        rc = step(e, h, i);
    }
    h->o->asked = mt_engine_is_asked(e);
    if (!rc)
        rc = mt_engine_flush(e, &h->o->err);
    return rc ? rc : evaluate(e, h->o);
}

/* Planes that another host has: this one does without. */
static int nowhere(void *, const struct mt_plane_part *part, struct mt_err *)
{
    if (!part->write)
        memset(part->mem, 0, part->n);
    return 0;
}

/* The planes that the engine has on this host. */
static int make_planes(mt_plane_set **out, const struct mt_engine_params *p, struct mt_err *err)
{
    MT_CLOSED_BY(mt_engine_plan_finish) struct mt_engine_plan plan = {0};
    struct mt_plane_set_params pp = {.elems = NULL};
    int rc = mt_engine_plan(&plan, p, err);
    if (!rc)
        rc = mt_layout_plane_params(&pp, p->layout, p->numerics.optimizer, p->numerics.grad_dtype, err);
    if (!rc)
        mt_engine_plan_trim(&plan, &pp);
    pp.move.fn = nowhere;
    rc = rc ? rc : mt_plane_set_create(out, &pp, err);
    free(pp.elems);
    return rc;
}

/* A host, from an empty process to its weights. */
static void *run_host(void *arg)
{
    const struct host *h = arg;
    const struct setting *s = h->s;
    struct outcome *o = h->o;
    MT_CLOSED_BY(mt_layout_destroy) struct mt_layout *layout = NULL;
    mt_device *dev[MOST_LANES] = {NULL};
    mt_plane_set *planes = NULL;
    mt_engine *engine = NULL;
    const struct mt_optimizer *adamw = mt_optimizer_find("adamw", MT_STATE_F32, NULL);
    const struct mt_numerics numerics = {.dtype = s->dtype, .grad_dtype = s->grad, .logits_chunk = 64, .optimizer = adamw,
                                         .optimizer_keys = {0.9, 0.99, 1e-8, 0.1}, .grad_clip = 0.5, .groups = MICRO};
    struct mt_layout_params lp = {.cut = mt_cut_layer};
    int rc = mt_layout_create(&layout, &s->cfg, &lp, &o->err);
    for (int i = 0; i < MT_MAX(s->placement.lanes, 1) && !rc; i++)
        rc = mt_device_create(&dev[i], &(struct mt_device_params){.kind = "cpu", .n_threads = 1, .budget_bytes = DEVICE_BYTES},
                              &o->err);
    struct mt_engine_params p = {
        .dev = dev[0], .other_dev = &dev[1], .layout = layout, .numerics = numerics,
        .placement = s->placement, .max_tokens = TOKENS, .max_docs = 2, .max_len = TOKENS, .max_micro = MICRO, .train = true,
        .host_bytes = UINT64_MAX, .net = h->net};
    p.placement.hosts = s->hosts;
    p.placement.host = h->number;
    if (!rc)
        rc = make_planes(&planes, &p, &o->err);
    p.planes = planes;
    if (!rc)
        rc = mt_weights_init_random(layout, planes, 1, 1, &o->err);
    if (!rc)
        rc = mt_engine_create(&engine, &p, &o->err);
    if (!rc)
        rc = train(engine, h);
    if (!rc)
        rc = read_masters(o, layout, planes);
    o->whole = engine && mt_engine_whole(engine);
    o->rc = rc;
    if (rc && h->net)
        mt_net_tell(h->net, &o->err);
    mt_engine_destroy(&engine);
    mt_plane_set_destroy(&planes);
    for (int i = 0; i < MOST_LANES; i++)
        mt_device_destroy(&dev[i]);
    return NULL;
}

static void run_faulty(const struct setting *s, struct outcome o[MOST_HOSTS], double deadline,
                       const struct mt_net_fault *fault)
{
    struct host host[MOST_HOSTS];
    MT_CLOSED_BY(mt_net_threads_destroy) mt_net_threads *t = NULL;
    memset(o, 0, MOST_HOSTS * sizeof(*o));
    assert_int_equal(mt_net_threads_create(&t, s->hosts, deadline, fault, NULL), 0);
    for (int i = 0; i < s->hosts; i++) {
        host[i] = (struct host){s, &o[i], s->hosts > 1 ? mt_net_threads_of(t, i) : NULL, i, 0};
        assert_int_equal(pthread_create(&host[i].thread, NULL, run_host, &host[i]), 0);
    }
    for (int i = 0; i < s->hosts; i++)
        pthread_join(host[i].thread, NULL);
}

static void run(const struct setting *s, struct outcome o[MOST_HOSTS], double deadline)
{
    run_faulty(s, o, deadline, NULL);
}

/* Of weights that another host updates a host may have no more than the half that devices read. */
static void compare_masters(const struct setting *s, const struct outcome *many, const struct outcome *one)
{
    const bool owned = s->placement.host_states == MT_HOST_STATES_OWNED, half = owned && s->dtype == MT_BF16;
    size_t n_exact = 0;
    for (size_t i = 0; i < one->n; i++) {
        uint32_t want, have;
        bool any = false;
        memcpy(&want, &one->masters[i], sizeof(want));
        for (int host = 0; host < s->hosts; host++) {
            memcpy(&have, &many[host].masters[i], sizeof(have));
            if (have != want && !(half && have == ((want + 0x8000) & 0xffff0000)))
                fail_msg("host %d of %d: weight %zu is %08x, alone %08x", host, s->hosts, i, have, want);
            any |= have == want;
            n_exact += have == want;
        }
        if (!any)
            fail_msg("no host of %d has weight %zu", s->hosts, i);
    }
    assert_true(half ? n_exact < 2 * one->n : n_exact == (size_t)s->hosts * one->n); /* each has one owner, by and large */
}

static void compare(const struct setting *s, const struct outcome *one)
{
    struct outcome many[MOST_HOSTS];
    run(s, many, 60);
    for (int i = 0; i < s->hosts; i++) {
        const struct outcome *o = &many[i];
        if (o->rc)
            fail_msg("host %d of %d: %s", i, s->hosts, o->err.msg);
        assert_memory_equal(o->loss, one->loss, sizeof(o->loss));
        assert_memory_equal(o->norm, one->norm, sizeof(o->norm));
        assert_true(o->eval == one->eval && o->asked && o->whole && o->n == one->n);
    }
    compare_masters(s, many, one);
    for (int i = 0; i < s->hosts; i++)
        free(many[i].masters);
}

static const struct mt_placement plain = {.slots = 2, .activations = MT_ACT_RECOMPUTE, .poison = true, .threads = 1};
static const struct mt_placement whole = {.slots = 2, .activations = MT_ACT_RECOMPUTE, .poison = true, .threads = 1,
                                          .host_states = MT_HOST_STATES_WHOLE};
static const struct mt_placement other = {.slots = 4, .activations = MT_ACT_KEEP, .poison = true, .threads = 1, .lanes = 2,
                                          .map = MT_MAP_DATA, .embedding = MT_EMBEDDING_HOST};

TEST(hosts_have_the_bits_of_one)
{
    for (int v = 0; v < 4; v++) { /* dense rows or packed ones of the embedding; casts to bf16 or none */
        struct setting s = {.dtype = v & 1 ? MT_BF16 : MT_F32, .grad = v & 1 ? MT_BF16 : MT_F32, .placement = plain,
                            .hosts = 1, .lost = -1};
        struct outcome one[MOST_HOSTS];
        read_config(&s.cfg, v & 2);
        run(&s, one, 60);
        if (one->rc)
            fail_msg("%s", one->err.msg);
        assert_true(one->loss[0] > 0 && one->norm[0] > 0 && one->n > 0);
        for (s.hosts = 2; s.hosts <= MOST_HOSTS; s.hosts++)
            for (int w = 0; w < 2; w++) { /* each unit's states on one host, or on all */
                s.placement = s.hosts == 2 ? other : plain;
                s.placement.host_states = w ? MT_HOST_STATES_WHOLE : MT_HOST_STATES_OWNED;
                if (w == (v & 1) || s.hosts == 3)
                    compare(&s, one);
            }
        free(one->masters);
    }
}

TEST(a_lost_host_ends_the_others)
{
    struct setting s = {.dtype = MT_F32, .grad = MT_F32, .hosts = 3, .lost = 1};
    struct outcome o[MOST_HOSTS];
    read_config(&s.cfg, false);
    for (int w = 0; w < 2; w++) {
        s.placement = w ? whole : plain;
        run(&s, o, patience(1));
        for (int i = 0; i < s.hosts; i++) {
            free(o[i].masters);
            if (i == s.lost)
                continue;
            assert_true(o[i].rc == -ETIMEDOUT || o[i].rc == -ECONNABORTED); /* the second may hear of it from the first */
            assert_true(o[i].whole == w); /* as after the first step: it can be saved, if it is all here */
            assert_non_null(strstr(o[i].err.msg, "host"));
        }
    }
}

/* A send of a host is lost, late, changed, cut or doubled, at several moments of a run: every host ends, those that fail
 * say which host it was, and the planes of all are as after a whole step, unless each has only its own: then none says
 * so. Only what is late changes nothing. */
static void seed_faults(int w)
{
    static const char *const name[MT_N_NET_FAULTS] = {"dropped", "late", "flipped", "short", "doubled", "silent"};
    struct setting s = {.dtype = MT_F32, .grad = MT_F32, .placement = w ? whole : plain, .hosts = 3, .lost = -1};
    struct outcome one[MOST_HOSTS], o[MOST_HOSTS];
    size_t sends = 0;
    struct mt_net_fault f = {.host = 1, .nth = SIZE_MAX, .seconds = 0.05, .sends = &sends};
    read_config(&s.cfg, false);
    run_faulty(&s, one, 60, &f);
    const size_t n = sends;
    assert_true(!one[0].rc && n > 40);
    for (f.kind = 0; f.kind < MT_N_NET_FAULTS; f.kind++) {
        bool lost = f.kind == MT_NET_DROPPED || f.kind == MT_NET_SILENT, late = f.kind == MT_NET_LATE;
        size_t tried = 0, failed = 0, n_whole = 0, same = 0, named = 0;
        for (f.nth = n / 7; f.nth + 2 < n; f.nth += n / 3) {
            run_faulty(&s, o, lost ? patience(0.3) : 60, &f);
            for (int i = 0; i < s.hosts; i++) {
                tried++;
                failed += o[i].rc != 0;
                named += o[i].rc && strstr(o[i].err.msg, "host ");
                n_whole += o[i].whole;
                same += !o[i].rc && o[i].n == one->n && !memcmp(o[i].masters, one->masters, one->n * sizeof(float));
                free(o[i].masters);
            }
        }
        print_message("%-8s %s %zu hosts: %zu failed and %zu named one, %zu whole, %zu with the bits\n", name[f.kind],
                      w ? "whole" : "owned", tried, failed, named, n_whole, same);
        assert_true(n_whole == (w ? tried : tried - failed) && named == failed && failed == (late ? 0 : tried) && same == (late ? tried : 0));
    }
    for (int i = 0; i < s.hosts; i++)
        free(one[i].masters);
}

TEST(faults_between_hosts_end_a_step_and_nothing_else)
{
    seed_faults(0);
    seed_faults(1);
}

TEST_GROUP(set_up, tear_down)

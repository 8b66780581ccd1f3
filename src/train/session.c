/* SPDX-License-Identifier: Apache-2.0 */
#include "train/session.h"

#include <stdlib.h>
#ifdef __GLIBC__
#include <malloc.h>
#endif
#include <string.h>
#include <time.h>

#include "base/log.h"
#include "base/mem.h"
#include "checkpoint/checkpoint.h"
#include "weights/peft.h"
#include "weights/in_files.h"
#include "weights/weights.h"
#include "plan/warm.h"

/* How files and scratch are read and written: tests choose. */
struct io_choice {
    enum mt_io_kind io;
    struct mt_io_fault fault;
    bool faulty;
};

static int choose_io(struct io_choice *c, struct mt_err *err)
{
    const char *fault = getenv("MEGATRAIN_IO_FAULT"), *io = getenv("MEGATRAIN_IO");
    *c = (struct io_choice){.io = io && !strcmp(io, "threads") ? MT_IO_THREADS : MT_IO_AUTO, .faulty = fault};
    return fault ? mt_io_fault_parse(&c->fault, fault, err) : 0;
}

/* The scratch holds planes, then spilled buffers. */
static int open_disk(struct mt_session *s, const struct mt_plane_set_params *p, struct mt_engine_params *e,
                     const struct io_choice *c, struct mt_err *err)
{
    const struct mt_cfg_list *dirs = &s->setup->in->cfg->memory.nvme_paths;
    uint64_t planes = mt_plane_set_disk_bytes(p);
    struct mt_disk_params d = {.dirs = (const char *const *)dirs->items, .n_dirs = (size_t)dirs->n,
                               .bytes = planes + s->setup->choice.engine.disk_spill_bytes, .io = c->io,
                               .fault = c->faulty ? &c->fault : NULL};
    e->disk_spill_at = planes;
    return s->setup->choice.engine.uses_disk ? mt_disk_open(&s->disk, &d, err) : 0;
}

/* Weights may be random, or all in a checkpoint; what is trained by blocks has the rest in these files. */
static int open_base(struct mt_session *s, struct mt_err *err)
{
    const struct mt_layout *l = s->setup->choice.layout;
    struct mt_err why = {0};
    int rc = mt_st_open_dir(&s->base, s->setup->in->weights_dir, &why);
    if (rc && rc != -ENOENT && !l->by_blocks && (l->cfg.moe.n_experts || l->cfg.nested))
        mt_warn("tensors of the model that are not used in training are left out of checkpoints: %s", why.msg);
    return rc && l->by_blocks ? mt_fail(err, why.kind, rc, "%s", why.msg) : 0;
}

/* What libraries load at a first use is loaded now; with the documents of a first step, if its data can be read. */
static int warm(const struct mt_setup *setup, const struct mt_engine_params *e, struct mt_err *err)
{
    mt_sampler *sampler = setup->in->sampler;
    MT_CLOSED_BY(mt_step_data_finish) struct mt_step_data first = {.n = 0};
    bool known = sampler && !mt_device_limits(e->dev)->shares_host_memory &&
                 !mt_step_data_init(&first, sampler, NULL) && !mt_sampler_fill(sampler, 0, &first, NULL);
    return mt_plan_warm(e, &setup->choice.engine.program, known ? &first : NULL, err);
}

/* From now on freed arrays of 1 MiB or more go back to the kernel at once. By itself glibc keeps what such arrays had,
 * and as small lists come to lie there the next one takes more: memory that no table has. */
static void return_freed(void)
{
#ifdef M_MMAP_THRESHOLD
    mallopt(M_MMAP_THRESHOLD, 1 << 20);
#endif
}

int mt_session_start(struct mt_session *s, const struct mt_setup *setup, struct mt_err *err)
{
    struct mt_plane_set_params p = {.elems = NULL};
    struct mt_engine_params e = mt_setup_engine_params(setup);
    struct io_choice io = {.faulty = false};
    *s = (struct mt_session){.setup = setup};
    return_freed();
    int rc = setup->request.train ? warm(setup, &e, err) : 0;
    rc = rc ?: mt_setup_plane_params(setup, &p, err);
    if (!rc && setup->request.train)
        rc = open_base(s, err);
    rc = rc ?: choose_io(&io, err) ?: open_disk(s, &p, &e, &io, err);
    if (!rc && setup->choice.engine.uses_files)
        rc = mt_weights_open_files(&s->files, setup->choice.layout, p.in_files, setup->in->weights_dir, io.io,
                                   io.faulty ? &io.fault : NULL, err);
    p.disk = e.disk = s->disk;
    p.files = e.files = s->files;
    rc = rc ?: MT_NEW(&s->base_sum, setup->choice.layout->n_tensors, "sums of the base", err)
            ?: MT_NEW(&s->own_sum, setup->choice.layout->n_tensors, "sums of the base", err)
            ?: mt_plane_set_create(&s->planes, &p, err);
    free(p.elems);
    e.planes = s->planes;
    return rc ?: mt_engine_create(&s->engine, &e, err);
}

int mt_session_sum_base(struct mt_session *s, struct mt_err *err)
{
    size_t n = s->files ? mt_file_weights_n_tensors(s->files) : 0, t = 0;
    int rc = 0;
    for (size_t i = 0; i < n && !rc; i++) {
        const char *name = mt_file_weights_tensor(s->files, i);
        while (s->setup->choice.layout->tensors[t].name != name) /* they are in the layout's order, under its names */
            t++;
        rc = mt_file_weights_sum(s->files, i, &s->base_sum[t], err);
    }
    return rc;
}

/* What a resumed learner's checkpoint says of the base. */
static struct mt_base_sums base_sums(const struct mt_session *s)
{
    const cJSON *want = NULL;
    for (size_t i = 0; i < s->setup->n_learners && !want; i++)
        want = s->setup->in[i].resumed.from_files;
    return (struct mt_base_sums){.sum = s->base_sum, .want = want, .files = s->files};
}

const uint64_t *mt_session_base_sums(struct mt_session *s, size_t learner)
{
    const struct mt_layout *own = mt_setup_layout_of(s->setup, learner), *l = s->setup->choice.layout;
    size_t from = 0;
    for (size_t i = 0; i < own->n_tensors; i++) {
        if (own->tensors[i].adapter)
            continue;
        while (l->tensors[from].adapter)
            from++;
        s->own_sum[i] = s->base_sum[from++];
    }
    return s->own_sum;
}

static int fill_model(struct mt_session *s, struct mt_err *err)
{
    const struct mt_setup *setup = s->setup;
    const struct mt_config *cfg = setup->in->cfg;
    if ((setup->request.train || setup->in->begins) && cfg->model.init == MT_INIT_RANDOM)
        return mt_weights_init_random(setup->choice.layout, s->planes, (uint64_t)cfg->train.seed,
                                      (int)setup->choice.placement.threads, err);
    const char *dir = setup->in->weights_dir;
    struct mt_base_sums base = base_sums(s);
    struct mt_train_state of_adapters = {.step = 0};
    struct timespec began;
    clock_gettime(CLOCK_REALTIME, &began);
    if (setup->request.train && !base.want) /* else its tensors are compared with the checkpoint's sums */
        base.all = mt_calloc(setup->choice.layout->n_tensors, sizeof(*base.all));
    int rc = mt_checkpoint_open_seal(dir, &base.sealed, err);
    if (!setup->request.train && *cfg->adapter.path &&
        !mt_checkpoint_read_state(cfg->adapter.path, &of_adapters, NULL)) {
        base.want = of_adapters.frozen;
        base.other_forms = true;
    }
    rc = rc ?: mt_weights_load(setup->choice.layout, s->planes, dir, &base, err)
            ?: mt_checkpoint_verify_left(dir, base.sealed, err);
    cJSON_Delete(base.sealed);
    mt_train_state_finish(&of_adapters);
    bool any_new = false;
    for (size_t i = 0; base.all && i < setup->choice.layout->n_tensors; i++)
        any_new |= base.all[i] != 0;
    if (!rc && any_new)
        rc = mt_second_look_start(&s->second_look, setup->choice.layout, dir, base.all,
                                  (int64_t)began.tv_sec * 1000000000 + began.tv_nsec, err);
    free(base.all);
    return rc;
}

static int fill_adapters(struct mt_session *s, size_t learner, struct mt_err *err)
{
    const struct mt_layout *own = mt_setup_layout_of(s->setup, learner);
    const struct mt_config *cfg = s->setup->in[learner].cfg;
    const char *path = cfg->adapter.path;
    uint64_t phase = s->setup->in[learner].resumed.phase; /* after a merge they are new */
    if (!*path || phase)
        return mt_adapter_init(own, s->planes, (uint64_t)cfg->train.seed + phase * UINT64_C(0x9E3779B97F4A7C15), err);
    int rc = mt_checkpoint_verify_model(path, false, false, err)
          ?: mt_peft_load(own, s->planes, path, err);
    bool files = !s->setup->request.train || cfg->model.init == MT_INIT_WEIGHTS;
    return rc || !files ? rc : mt_peft_compare_copies(own, path, s->setup->in->weights_dir, err);
}

int mt_session_start_guard(struct mt_session *s, struct mt_err *err)
{
    const struct mt_setup *setup = s->setup;
    enum mt_verify verify = setup->choice.placement.verify;
    if (!setup->request.train || verify == MT_VERIFY_OFF)
        return 0;
    struct mt_guard_params p = {.planes = s->planes,
                                .n_units = setup->choice.layout->n_units,
                                .trained = verify == MT_VERIFY_ALL,
                                .n_threads = (int)setup->choice.placement.threads};
    int rc = mt_guard_create(&s->guard, &p, err);
    if (!rc)
        mt_engine_set_guard(s->engine, s->guard);
    return rc;
}

int mt_session_fill_weights(struct mt_session *s, const char *const *resume, struct mt_err *err)
{
    const struct mt_setup *setup = s->setup;
    bool adapters = setup->choice.layout->n_adapters || setup->in->cfg->adapter.kind != MT_ADAPTER_NONE;
    bool resumed = resume && *resume;
    int rc = resumed && !adapters ? 0 : fill_model(s, err);
    for (size_t i = 0; i < setup->n_learners && !rc; i++) {
        if (resume && resume[i])
            rc = mt_checkpoint_load(resume[i], mt_setup_layout_of(setup, i), s->planes, err);
        else if (adapters)
            rc = fill_adapters(s, i, err);
    }
    struct mt_base_sums base = base_sums(s);
    if (!rc && resumed && !adapters)
        rc = mt_weights_load_base(setup->choice.layout, s->planes, setup->in->weights_dir, &base, err);
    return rc ?: mt_session_start_guard(s, err);
}

/* Reads what has changed from the model's files again. */
static int mend(struct mt_session *s, const struct mt_guard_block *b, struct mt_err *err)
{
    const struct mt_layout *l = s->setup->choice.layout;
    const struct mt_plane_desc *d = mt_plane_desc_of(s->planes, b->kind);
    struct mt_base_sums base = base_sums(s);
    struct mt_err why = {0};
    unsigned long long first = s->steps > MT_GUARD_PASSES ? s->steps - MT_GUARD_PASSES : 0;
    if (mt_guard_is_mended(s->guard, b)) /* with another block of its unit */
        return 0;
    const struct mt_unit *u = &l->units[b->unit];
    const char *name = l->tensors[u->first_tensor].name;
    mt_warn("a bit of host memory has changed in %s of the unit that begins with %s: it is read from %s again; losses of the last "
            "%llu steps, and what they trained, may be wrong by it (is it ECC memory? see megatrain doctor)", d->use, name, s->setup->in->weights_dir,
            (unsigned long long)s->steps - first);
    int rc = mt_weights_reload(l, s->planes, s->setup->in->weights_dir, b->unit, b->kind, &base, &why);
    if (!rc && !mt_guard_is_mended(s->guard, b))
        rc = mt_fail(&why, MT_ERR_RUNTIME, -EBADMSG, "the files do not have it");
    return rc ? mt_fail(err, MT_ERR_RUNTIME, -EBADMSG,
                        "%s of the unit that begins with %s have changed in host memory and cannot be mended (%s): go on from the "
                        "last checkpoint with --resume", d->use, name, why.msg) : 0;
}

int mt_session_guard(struct mt_session *s, struct mt_err *err)
{
    struct mt_guard_block b;
    int rc = 0;
    s->steps++;
    if (s->second_look && mt_second_look_over(s->second_look))
        rc = mt_second_look_end(&s->second_look, err);
    while (s->guard && !rc && mt_guard_take(s->guard, &b))
        rc = mend(s, &b, err);
    if (s->guard && !rc)
        mt_guard_pass(s->guard);
    return rc;
}

int mt_session_check_frozen(struct mt_session *s, struct mt_err *err)
{
    struct mt_guard_block b;
    int rc = 0;
    for (bool any = s->guard != NULL; any && !rc;) { /* once more after it found any: there may be others */
        struct mt_err why;
        any = false;
        if (mt_guard_check_frozen(s->guard, &why)) /* which is no reason to lose the state */
            mt_warn("frozen weights in host memory were not checked at the end: %s", why.msg);
        while (!rc && mt_guard_take(s->guard, &b)) {
            any = true;
            rc = mend(s, &b, err);
        }
    }
    return rc;
}

int mt_session_look_again(struct mt_session *s, bool last, struct mt_err *err)
{
    if (!s->second_look || mt_second_look_over(s->second_look))
        return mt_second_look_end(&s->second_look, err);
    if (last) {
        mt_warn("the run is saved before the model's weights were read a second time: there was no time for it");
        mt_second_look_drop(&s->second_look);
    }
    return 0;
}

void mt_session_finish(struct mt_session *s)
{
    mt_second_look_drop(&s->second_look);
    mt_guard_destroy(&s->guard);
    mt_engine_destroy(&s->engine);
    mt_plane_set_destroy(&s->planes);
    mt_disk_close(&s->disk);
    mt_file_weights_close(&s->files);
    mt_st_close(&s->base);
    free(s->base_sum);
    free(s->own_sum);
    *s = (struct mt_session){0};
}

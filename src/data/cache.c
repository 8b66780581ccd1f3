/* SPDX-License-Identifier: Apache-2.0 */
#include "data/cache.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#include <xxhash.h>

#include "base/fs.h"
#include "base/json.h"
#include "base/log.h"
#include "base/mem.h"
#include "base/read_progress.h"
#include "base/units.h"
#include "data/chat_template.h"
#include "data/columns.h"
#include "data/helper.h"
#include "data/samples.h"

static int hash_file(XXH3_state_t *state, const char *path, bool needed, struct mt_err *err)
{
    char buf[65536];
    MT_STREAM_CLOSED FILE *f = fopen(path, "re");
    if (!f && !needed)
        return 0;
    if (!f)
        return mt_fail(err, MT_ERR_INPUT, -errno, "cannot open data file %s: %s", path,
                       strerror(errno));
    struct mt_read_progress progress;
    struct stat st;
    size_t n;
    mt_read_progress_begin(&progress, MT_PATH("comparing %s with the cache", path), fstat(fileno(f), &st) ? 0 : (uint64_t)st.st_size);
    while ((n = fread(buf, 1, sizeof(buf), f)) > 0) {
        XXH3_64bits_update(state, buf, n);
        mt_read_progress_add(&progress, n);
    }
    int rc = ferror(f) ? mt_fail(err, MT_ERR_INPUT, errno ? -errno : -EIO, "cannot read %s: %s", path,
                                 strerror(errno))
                       : 0;
    mt_read_progress_end(&progress);
    return rc;
}

static void hash_text(XXH3_state_t *state, const char *text)
{
    XXH3_64bits_update(state, text ? text : "", strlen(text ? text : "") + 1);
}

static int is_tokenizer(const struct dirent *e)
{
    const char *dot = strrchr(e->d_name, '.');
    return dot && !strncmp(e->d_name, "tokenization_", 13) && !strcmp(dot, ".py");
}

static int is_code(const struct dirent *e)
{
    const char *dot = strrchr(e->d_name, '.');
    return dot && (!strcmp(dot, ".py") || !strcmp(dot, ".jinja"));
}

/* Hashes the chosen files of a folder, in order of their names. */
static void hash_folder(XXH3_state_t *state, const char *dir, int (*chosen)(const struct dirent *e))
{
    MT_FREED struct dirent **names = NULL;
    int n = scandir(dir, &names, chosen, alphasort);
    for (int i = 0; i < n; i++) {
        hash_text(state, names[i]->d_name);
        hash_file(state, MT_PATH("%s/%s", dir, names[i]->d_name), false, NULL);
        free(names[i]);
    }
}

/* Hashes the ids at which config.json says that generation stops; the rest of it changes no token. */
static void hash_end(XXH3_state_t *state, const char *model_dir)
{
    MT_FREED char *text = NULL;
    MT_JSON_FREED cJSON *root = NULL;
    if (!mt_json_read_file(&root, MT_PATH("%s/config.json", model_dir), MT_ERR_INPUT, NULL) && mt_json_get(root, "eos_token_id"))
        text = mt_json_print(mt_json_get(root, "eos_token_id"), false);
    hash_text(state, text);
}

/* Hashes everything but the data file that the helper's tokens depend on. */
static int hash_helper(XXH3_state_t *state, const struct mt_dataset_params *p, struct mt_err *err)
{
    static const char *const files[] = {"tokenizer.json",          "tokenizer_config.json",
                                        "tekken.json",             "tiktoken.model",
                                        "special_tokens_map.json", "generation_config.json",
                                        "added_tokens.json",       "chat_template.json",
                                        "chat_template.jinja",     "additional_chat_templates"};
    static const char *const folders[] = {"megatrain_data", "megatrain_data/templates"};
    MT_FREED char *helper = mt_helper_dir();
    int rc = 0;
    for (size_t i = 0; i < MT_ARRAY_LEN(files) && p->model_dir && !rc; i++) {
        const char *path = MT_PATH("%s/%s", p->model_dir, files[i]);
        hash_text(state, files[i]);
        if (mt_is_dir(path))
            hash_folder(state, path, is_code);
        else
            rc = hash_file(state, path, false, err);
    }
    if (p->model_dir && !rc) {
        hash_folder(state, p->model_dir, is_tokenizer); /* that tiktoken.model's pattern is read from */
        hash_end(state, p->model_dir);
    }
    hash_text(state, p->template_);
    if (mt_chat_template_is_file(p->template_))
        rc = rc ? rc : hash_file(state, p->template_, true, err);
    for (size_t i = 0; i < MT_ARRAY_LEN(folders) && helper; i++)
        hash_folder(state, MT_PATH("%s/%s", helper, folders[i]), is_code);
    return rc;
}

struct wanted {
    char path[4096];
    uint64_t hash;
    bool helper;
};

static int hash_source(struct wanted *w, const struct mt_source_file *f, const struct mt_dataset_params *p,
                       struct mt_err *err)
{
    bool helper = w->helper;
    XXH3_state_t *state = XXH3_createState();
    const char *dot = strrchr(f->path, '.');
    char options[128];
    if (!state)
        return mt_fail_nomem(err, "a hash", 576);
    XXH3_64bits_reset(state);
    snprintf(options, sizeof(options), "v%d %d %d %d %zu", MT_SHARD_VERSION, helper, (int)p->format,
             helper ? (int)p->train_on : 0, p->vocab);
    hash_text(state, options);
    hash_text(state, p->tokenizer);
    hash_text(state, dot);
    hash_text(state, f->entry);
    if (p->max_samples) {
        snprintf(options, sizeof(options), "at most %zu", p->max_samples);
        hash_text(state, options);
    }
    for (int i = 0; f->columns && i < f->columns->n; i++)
        hash_text(state, f->columns->items[i]);
    int rc = helper ? hash_helper(state, p, err) : 0;
    rc = rc ?: hash_file(state, f->path, true, err);
    w->hash = XXH3_64bits_digest(state) | 1; /* never 0, which matches any hash */
    XXH3_freeState(state);
    return rc;
}

/* Removes temporary files of a process that was killed while making a shard. The caller holds the lock. */
static void clear_parts(const char *dir)
{
    MT_DIR_CLOSED DIR *d = opendir(dir);
    for (struct dirent *e; d && (e = readdir(d));)
        if (strstr(e->d_name, ".tokens.") && strstr(e->d_name, ".tmp"))
            unlinkat(dirfd(d), e->d_name, 0);
}

/*
 * *fd: the lock; -1 where there is none to be had: a cache that may only be read serves as long as nothing is missing,
 * and a file system without locks is no reason to stop.
 */
static int lock_cache(const char *dir, int *fd, struct mt_err *err)
{
    const char *path = MT_PATH("%s/lock", dir);
    bool made = !mt_path_exists(dir);
    struct mt_err why;
    int rc = mt_mkdir_p(dir, &why);
    if (rc)
        mt_fail(err, why.kind, rc, "%s: it is for token shards; data.cache_dir names another folder", why.msg);
    if (!rc && made && chmod(dir, 0700)) /* what people train on is nobody else's to read */
        mt_debug("%s: %s", dir, strerror(errno));
    *fd = rc ? -1 : open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0666);
    bool read_only = !rc && *fd < 0 && (errno == EROFS || errno == EACCES);
    if (!rc && *fd < 0 && !read_only)
        rc = mt_fail(err, MT_ERR_RUNTIME, -errno, "cannot open %s of data.cache_dir: %s", path, strerror(errno));
    int locked = *fd < 0 ? -EROFS : mt_lock_file(*fd, false);
    if (locked == -EWOULDBLOCK) {
        mt_info("waiting for another run that makes token shards in %s", dir);
        locked = mt_lock_file(*fd, true);
    }
    if (!rc && locked && !read_only)
        mt_warn("%s cannot be locked (%s): see to it that no other run makes token shards there", path, strerror(-locked));
    if (!rc && !locked)
        clear_parts(dir);
    return rc;
}

static int make_shard(const struct mt_source_file *f, const struct mt_dataset_params *p,
                      const char *path, uint64_t hash, struct mt_err *err)
{
    MT_CLOSED_BY(mt_shard_writer_finish) struct mt_shard_writer w = {0};
    int rc = mt_shard_writer_open(&w, path, err);
    MT_CLOSED_BY(mt_samples_finish) struct mt_sample_reader r = {.format = p->format,
                                 .bytes = !strcmp(p->tokenizer, "byte"),
                                 .vocab = p->vocab,
                                 .columns = f->columns,
                                 .max_samples = p->max_samples,
                                 .out = &w,
                                 .header = {.vocab = p->vocab, .source_hash = hash}};
    return rc ?: mt_samples_read_file(&r, f->path, err) ?: mt_shard_writer_commit(&w, &r.header, err);
}

static void tell_progress(const cJSON *e, const char *path)
{
    const char *slash = strrchr(path, '/');
    char of[32] = "", eta[32];
    if (mt_json_number(e, "files", 0) > 1)
        snprintf(of, sizeof(of), "file %.0f of %.0f, ", mt_json_number(e, "file", 0), mt_json_number(e, "files", 0));
    mt_progress("%.0f%%, %.0f samples, %.2fM tokens, %.0fk tokens/s, eta %s (%s%s)",
                100 * mt_json_number(e, "share", 0), mt_json_number(e, "samples", 0), mt_json_number(e, "tokens", 0) * 1e-6,
                mt_json_number(e, "tokens_per_second", 0) * 1e-3,
                mt_format_seconds(eta, sizeof(eta), mt_json_number(e, "eta", 0)), of, slash ? slash + 1 : path);
}

static void on_event(void *, const cJSON *e)
{
    const char *event = mt_json_string(e, "event", ""), *path = mt_json_string(e, "path", "");
    if (!strcmp(event, "progress"))
        tell_progress(e, path);
    else if (!strcmp(event, "source"))
        mt_info("%s: %s, %.0f sample%s, %.0f tokens in %.1f s", path, mt_json_string(e, "format", ""), mt_json_number(e, "samples", 0),
                mt_json_number(e, "samples", 0) == 1 ? "" : "s", mt_json_number(e, "tokens", 0), mt_json_number(e, "seconds", 0));
}

static void add_date(cJSON *job)
{
    const char *epoch = getenv("SOURCE_DATE_EPOCH");
    time_t now = epoch && *epoch ? (time_t)strtoll(epoch, NULL, 10) : time(NULL);
    struct tm tm;
    char date[16];
    if ((epoch && *epoch ? gmtime_r(&now, &tm) : localtime_r(&now, &tm)) &&
        strftime(date, sizeof(date), "%Y-%m-%d", &tm))
        cJSON_AddStringToObject(job, "date", date);
}

static cJSON *new_job(const struct mt_dataset_params *p)
{
    char train_on[MT_CHOICE_NAME];
    cJSON *job = cJSON_CreateObject();
    cJSON_AddStringToObject(job, "mode", "prepare");
    if (p->model_dir)
        cJSON_AddStringToObject(job, "model_dir", p->model_dir);
    mt_json_put(job, "tokenizer=%s, template=%s, train_on=%s, vocab=%f, processes=%f", p->tokenizer,
                p->template_ ? p->template_ : "model",
                mt_choice_name(train_on, MT_TRAIN_ON_NAMES, (int)p->train_on), (double)p->vocab,
                (double)p->n_processes);
    add_date(job);
    cJSON_AddArrayToObject(job, "sources");
    return job;
}

static void add_to_job(cJSON *job, const struct mt_source_file *f, const struct mt_dataset_params *p,
                       const char *out, uint64_t hash)
{
    cJSON *s = cJSON_CreateObject();
    char hex[20], format[MT_CHOICE_NAME];
    snprintf(hex, sizeof(hex), "%016llx", (unsigned long long)hash);
    mt_json_put(s, "path=%s, format=%s, out=%s, hash=%s", f->path,
                mt_choice_name(format, MT_FORMAT_NAMES, (int)p->format), out, hex);
    if (f->entry)
        mt_json_add(s, "entry", cJSON_Parse(f->entry));
    if (p->max_samples)
        cJSON_AddNumberToObject(s, "most", (double)p->max_samples);
    if (f->columns)
        mt_json_add(s, "columns", mt_columns_json(f->columns));
    mt_json_append(mt_json_get(job, "sources"), s);
}

/* Opens a shard of the cache if it is there and undamaged. */
static bool open_whole(struct mt_shard *s, const struct wanted *w)
{
    struct mt_err why;
    if (mt_shard_open(s, w->path, w->hash, NULL))
        return false;
    if (!mt_shard_verify(s, w->path, &why))
        return true;
    if (s->header->content_sum) /* 0: the process that made it was killed before it wrote the checksums */
        mt_warn("%s; making it again", why.msg);
    mt_shard_close(s);
    return false;
}

/* Makes missing shards, with the lock held: first those of files that C code reads, then all others in one run of the
 * helper. */
static int make_missing(struct mt_shard *shards, bool *made, const struct wanted *want,
                        const struct mt_source_list *l, const struct mt_dataset_params *p,
                        struct mt_err *err)
{
    MT_JSON_FREED cJSON *job = new_job(p);
    int rc = 0, n_helped = 0;
    for (size_t i = 0; i < l->n && !rc; i++) {
        if (open_whole(&shards[i], &want[i]))
            continue;
        made[i] = true;
        for (size_t k = 0; k < i; k++) /* files of equal content share a shard */
            if (made[k] && want[k].hash == want[i].hash)
                goto next;
        if (want[i].helper) {
            add_to_job(job, &l->items[i], p, want[i].path, want[i].hash);
            n_helped++;
        } else {
            rc = make_shard(&l->items[i], p, want[i].path, want[i].hash, err);
        }
    next:;
    }
    if (!rc && n_helped) {
        mt_info("making tokens of %d data file%s with %d process%s (kept in %s)", n_helped,
                n_helped > 1 ? "s" : "", p->n_processes, p->n_processes > 1 ? "es" : "", p->cache_dir);
        rc = mt_helper_run(job, on_event, NULL, err);
        mt_progress_end();
    }
    for (size_t i = 0; i < l->n && !rc; i++)
        if (made[i])
            rc = mt_shard_seal(want[i].path, err);
    for (size_t i = 0; i < l->n && !rc; i++)
        if (!shards[i].map) {
            rc = mt_shard_open(&shards[i], want[i].path, want[i].hash, err)
              ?: mt_shard_verify(&shards[i], want[i].path, err);
        }
    return rc;
}

/* Needs no lock: nothing is made, and a shard has its name when it is whole. */
static int open_prepared(struct mt_shard *shards, const struct wanted *want, const struct mt_source_list *l,
                         struct mt_err *err)
{
    struct mt_err why;
    for (size_t i = 0; i < l->n; i++)
        if (mt_shard_open(&shards[i], want[i].path, want[i].hash, &why) ||
            mt_shard_verify(&shards[i], want[i].path, &why))
            return mt_fail(err, MT_ERR_INPUT, -ENOENT, "%s is not prepared: megatrain data prepare", l->items[i].path);
    return 0;
}

int mt_cache_open_shards(struct mt_shard *shards, bool *made, const struct mt_source_list *l,
                         const struct mt_dataset_params *p, struct mt_err *err)
{
    MT_FREED struct wanted *want = mt_calloc(l->n, sizeof(*want));
    MT_FD_CLOSED int fd = -1;
    int rc = want ? 0 : mt_fail_nomem(err, "the cache", l->n * sizeof(*want));
    for (size_t i = 0; i < l->n && !rc; i++) {
        want[i].helper = mt_source_needs_helper(&l->items[i], p->format, p->tokenizer);
        rc = hash_source(&want[i], &l->items[i], p, err);
        mt_path_printf(want[i].path, sizeof(want[i].path), "%s/%016llx.tokens", p->cache_dir,
                 (unsigned long long)want[i].hash);
    }
    if (!rc && !p->prepared_only)
        rc = lock_cache(p->cache_dir, &fd, err);
    return rc ?: p->prepared_only ? open_prepared(shards, want, l, err) : make_missing(shards, made, want, l, p, err);
}

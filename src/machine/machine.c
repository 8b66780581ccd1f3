/* SPDX-License-Identifier: Apache-2.0 */
#include "machine/machine.h"

#include <ctype.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/fs.h"
#include "base/mem.h"
#include "base/strbuf.h"
#include "config/ini.h"
#include "hw/hw.h"
#include "kinds/kinds.h"
#include "optim/optimizer.h"

static const struct rate_key {
    const char *section, *key, *unit, *help;
} rate_keys[MT_N_RATES] = {
#define RATE_KEY(id, section, key, unit, help) [MT_RATE_##id] = {section, key, unit, help},
    MT_MACHINE_RATES(RATE_KEY)
#undef RATE_KEY
};

void mt_machine_finish(struct mt_machine *m)
{
    free(m->samples);
    *m = (struct mt_machine){0};
}

struct reader {
    struct mt_machine *m;
    int version;
    const char *file; /* of the line being read */
    int line;
};

__attribute__((format(printf, 3, 4))) static int bad(const struct reader *r, struct mt_err *err, const char *fmt, ...)
{
    char msg[256];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(msg, sizeof(msg), fmt, ap);
    va_end(ap);
    return mt_fail(err, MT_ERR_USAGE, -EINVAL, "%s:%d: %s", r->file, r->line, msg);
}

/* "25 measured", "25 rated", "25 rated: its data sheet" (from: [MT_MAX_FROM]). */
static bool parse_rate(struct mt_rate *r, char *from, const char *text)
{
    char *end;
    double v = strtod(text, &end);
    while (*end == ' ')
        end++;
    bool measured = !strcmp(end, "measured"), rated = !strcmp(end, "rated"), says = !strncmp(end, "rated: ", 7);
    const char *why = says ? end + 7 : "";
    if (end == text || !(v >= 0) || !isfinite(v) || (!measured && !rated && !says) || strlen(why) >= MT_MAX_FROM)
        return false;
    *r = (struct mt_rate){v, measured ? MT_RATE_MEASURED : MT_RATE_RATED};
    memcpy(from, why, strlen(why) + 1);
    return true;
}

static int take_text(struct reader *r, char *out, size_t len, const char *key, const char *value, struct mt_err *err)
{
    if (strlen(value) >= len)
        return bad(r, err, "machine.%s has more than %zu bytes", key, len - 1);
    memcpy(out, value, strlen(value) + 1);
    return 0;
}

static int read_machine_key(struct reader *r, const char *key, const char *value, struct mt_err *err)
{
    struct mt_machine *m = r->m;
    const struct {
        const char *key;
        char *text;
        size_t size;
    } texts[] = {{"name", m->name, sizeof(m->name)}, {"gpu", m->gpu, sizeof(m->gpu)},
                 {"fingerprint", m->fingerprint, sizeof(m->fingerprint)}};
    for (size_t i = 0; i < MT_ARRAY_LEN(texts); i++)
        if (!strcmp(key, texts[i].key))
            return take_text(r, texts[i].text, texts[i].size, key, value, err);
    if (!strcmp(key, "version")) {
        r->version = atoi(value);
        return 0;
    }
    if (strcmp(key, "kind"))
        return bad(r, err, "unknown key \"machine.%s\"", key);
    const struct mt_device_kind *kind = mt_device_kind(value);
    if (!kind)
        return bad(r, err, "machine.kind must be cpu or cuda, not \"%s\"", value);
    m->cpu = kind->shares_host_memory;
    return 0;
}

bool mt_machine_add_update(struct mt_machine *m, const char *name, int threads, double ns)
{
    struct mt_update_sample *s = m->updates;
    int at = 0;
    while (at < m->n_updates &&
           (strcmp(s[at].name, name) < 0 || (!strcmp(s[at].name, name) && s[at].threads < threads)))
        at++;
    bool have = at < m->n_updates && !strcmp(s[at].name, name) && s[at].threads == threads;
    if (!have && m->n_updates == MT_MAX_UPDATES)
        return false;
    if (!have)
        memmove(&s[at + 1], &s[at], (size_t)(m->n_updates++ - at) * sizeof(*s));
    s[at] = (struct mt_update_sample){.threads = threads, .ns = ns};
    snprintf(s[at].name, sizeof(s[at].name), "%s", name);
    return true;
}

static int read_adam(struct reader *reader, const char *key, const char *value, struct mt_err *err)
{
    struct mt_machine *m = reader->m;
    struct mt_rate r;
    int threads = atoi(key);
    if (threads < 1 || !parse_rate(&r, m->adam_from, value) || !(r.value > 0))
        return bad(reader, err, "a line of [adam] must be \"THREADS = NANOSECONDS measured|rated[: SOURCE]\", not \"%s = %s\"", key,
                   value);
    m->adam_source = r.source;
    return mt_machine_add_update(m, "", threads, r.value) ? 0 : bad(reader, err, "[adam] has too many lines");
}

/* "adamw/8bit/16 = 0.14 measured", "adamw/8bit/24bit/16 = 0.13 measured" */
static int read_update(struct reader *reader, const char *key, const char *value, struct mt_err *err)
{
    const char *threads = strrchr(key, '/');
    char name[MT_OPTIMIZER_NAME], from[MT_MAX_FROM];
    struct mt_rate r;
    if (!threads || threads - key >= (ptrdiff_t)sizeof(name) || atoi(threads + 1) < 1 || !parse_rate(&r, from, value) ||
        !(r.value > 0))
        return bad(reader, err, "a line of [updates] must be \"TYPE/STATES[/MASTER][/stochastic]/THREADS = NANOSECONDS measured\", not "
                   "\"%s = %s\"", key, value);
    snprintf(name, sizeof(name), "%.*s", (int)(threads - key), key);
    return mt_machine_add_update(reader->m, name, atoi(threads + 1), r.value)
               ? 0 : bad(reader, err, "[updates] has too many lines");
}

static int on_key(void *ctx, const char *file, int line, const char *section, const char *key,
                  const char *value, struct mt_err *err)
{
    struct reader *r = ctx;
    r->file = file;
    r->line = line;
    if (!strcmp(section, "machine"))
        return read_machine_key(r, key, value, err);
    if (!strcmp(section, "adam"))
        return read_adam(r, key, value, err);
    if (!strcmp(section, "updates"))
        return read_update(r, key, value, err);
    if (!strcmp(section, "ops")) {
        struct mt_metered op;
        double s = atof(value);
        if (!mt_operation_parse(&op, key) || !(s > 0))
            return bad(r, err, "a line of [ops] must be \"OPERATION = SECONDS\", not \"%s = %s\"", key, value);
        return mt_machine_add_sample(r->m, &op, s) ? 0 : mt_fail_nomem(err, "a machine profile", 1);
    }
    for (int i = 0; i < MT_N_RATES; i++)
        if (!strcmp(section, rate_keys[i].section) && !strcmp(key, rate_keys[i].key))
            return parse_rate(&r->m->rate[i], r->m->from[i], value)
                       ? 0
                       : bad(r, err, "%s must be a number, then rated or measured, not \"%s\"; behind \"rated: \" may be its source, in less than %d bytes",
                             key, value, MT_MAX_FROM);
    return bad(r, err, "unknown key \"%s.%s\"", section, key);
}

int mt_machine_parse(struct mt_machine *out, const char *path, struct mt_err *err)
{
    MT_CLOSED_BY(mt_machine_finish) struct mt_machine m = {0};
    struct reader r = {.m = &m};
    int rc = mt_ini_parse_file(path, on_key, &r, err);
    if (!rc && r.version != MT_MACHINE_VERSION)
        rc = mt_fail(err, MT_ERR_USAGE, -ESTALE, "%s: a machine profile of version %d; this program reads version %d",
                     path, r.version, MT_MACHINE_VERSION);
    if (!rc)
        *out = MT_GIVE(m);
    return rc;
}

int mt_machine_read(struct mt_machine *out, const char *path, struct mt_err *err)
{
    MT_CLOSED_BY(mt_machine_finish) struct mt_machine m = {0};
    int rc = mt_machine_parse(&m, path, err) ?: mt_machine_complete(&m, path, err);
    if (!rc)
        *out = MT_GIVE(m);
    return rc;
}

void mt_machine_rate(struct mt_machine *m, enum mt_rate_id id, double value, const char *from, ...)
{
    va_list ap;
    va_start(ap, from);
    m->rate[id] = (struct mt_rate){value, MT_RATE_RATED};
    vsnprintf(m->from[id], sizeof(m->from[id]), from, ap);
    va_end(ap);
}

void mt_machine_measured(struct mt_machine *m, enum mt_rate_id id, double value)
{
    m->rate[id] = (struct mt_rate){value, MT_RATE_MEASURED};
}

/* Sets a rate that is missing to a number, or to a share of another rate. */
static void assume(struct mt_machine *m, enum mt_rate_id id, double value)
{
    if (m->rate[id].source == MT_RATE_NONE)
        mt_machine_rate(m, id, value, "assumed, of any machine");
}

static void derive(struct mt_machine *m, enum mt_rate_id id, double share, enum mt_rate_id of)
{
    if (m->rate[id].source == MT_RATE_NONE)
        mt_machine_rate(m, id, share * m->rate[of].value, "assumed: %g of %s", share, rate_keys[of].key);
}

/* Bound by memory; a core moves about 12 GB/s. */
static void derive_adam(struct mt_machine *m)
{
    const double cores = m->rate[MT_RATE_CORES].value, dram = m->rate[MT_RATE_DRAM].value, of_dram = 0.85, of_core = 12;
    double bytes = mt_optimizer_bytes(&mt_adamw, MT_MASTER_F32, MT_BF16);
    mt_machine_add_update(m, "", (int)cores, bytes / MT_MIN(of_dram * dram, of_core * cores));
    m->adam_source = MT_RATE_RATED;
    snprintf(m->adam_from, sizeof(m->adam_from), "assumed: %g bytes, at %g of dram_gbs or %g GB/s a core", bytes, of_dram,
             of_core);
}

int mt_machine_complete(struct mt_machine *m, const char *path, struct mt_err *err)
{
    static const enum mt_rate_id needed[] = {MT_RATE_GEMM_BF16, MT_RATE_GEMM_F32, MT_RATE_DEVICE_GBS,
                                             MT_RATE_H2D, MT_RATE_D2H, MT_RATE_CORES,
                                             MT_RATE_HOST_GIB, MT_RATE_DRAM};
    struct mt_rate *r = m->rate;
    for (size_t i = 0; i < MT_ARRAY_LEN(needed); i++)
        if (!(r[needed[i]].value > 0))
            return mt_fail(err, MT_ERR_USAGE, -EINVAL, "%s: %s.%s is missing: %s", path,
                           rate_keys[needed[i]].section, rate_keys[needed[i]].key,
                           rate_keys[needed[i]].help);
    if (m->cpu)
        derive(m, MT_RATE_GEMM_E4M3, 1, MT_RATE_GEMM_F32); /* codes become f32 */
    derive(m, MT_RATE_ATTENTION, 0.6, MT_RATE_GEMM_BF16);
    derive(m, MT_RATE_ATTENTION_BWD, 0.75, MT_RATE_ATTENTION);
    assume(m, MT_RATE_OP_US, 5);
    derive(m, MT_RATE_PEAK_BF16, 1, MT_RATE_GEMM_BF16);
    derive(m, MT_RATE_PEAK_F32, 1, MT_RATE_GEMM_F32);
    if (r[MT_RATE_GEMM_E4M3].value > 0)
        derive(m, MT_RATE_PEAK_E4M3, 1, MT_RATE_GEMM_E4M3);
    derive(m, MT_RATE_DEVICE_GIB, m->cpu ? 0.25 : 0, MT_RATE_HOST_GIB);
    derive(m, MT_RATE_H2D_BOTH, 0.85, MT_RATE_H2D);
    derive(m, MT_RATE_D2H_BOTH, 0.85, MT_RATE_D2H);
    if (m->cpu) {
        derive(m, MT_RATE_H2D_SHORT, 1, MT_RATE_H2D);
        derive(m, MT_RATE_D2H_SHORT, 1, MT_RATE_D2H);
    }
    assume(m, MT_RATE_LINK_GPUS, 1);
    assume(m, MT_RATE_COPY_US, 10);
    if (r[MT_RATE_DRAM].value < 20)
        derive(m, MT_RATE_COPY, 0.5, MT_RATE_DRAM);
    assume(m, MT_RATE_COPY, 10);
    derive(m, MT_RATE_READ_BOTH, 0.6, MT_RATE_READ);
    derive(m, MT_RATE_WRITE_BOTH, 0.6, MT_RATE_WRITE);
    assume(m, MT_RATE_DISK_US, 100);
    assume(m, MT_RATE_STEP_US, 500);
    assume(m, MT_RATE_TOKEN_NS, 20);
    if (!m->n_updates || m->updates[0].name[0])
        derive_adam(m);
    return 0;
}

/* Where a measured rate is from is known. */
static const char *source_of(struct mt_rate r, const char *from)
{
    return r.source == MT_RATE_RATED ? from : "";
}

struct mt_price *mt_machine_prices(const struct mt_machine *m, size_t *n)
{
    struct mt_price *all = mt_calloc(MT_N_RATES + MT_MAX_UPDATES, sizeof(*all));
    *n = 0;
    for (int i = 0; all && i < MT_N_RATES; i++) {
        const struct rate_key *k = &rate_keys[i];
        struct mt_price *p = &all[*n];
        if (m->rate[i].source == MT_RATE_NONE || !(m->rate[i].value > 0))
            continue;
        *p = (struct mt_price){.unit = k->unit, .rate = m->rate[i], .from = source_of(m->rate[i], m->from[i])};
        snprintf(p->key, sizeof(p->key), "%s.%s", k->section, k->key);
        ++*n;
    }
    for (int i = 0; all && i < m->n_updates && !m->updates[i].name[0]; i++) {
        struct mt_price *p = &all[(*n)++];
        *p = (struct mt_price){.unit = "ns", .rate = {m->updates[i].ns, m->adam_source}};
        p->from = source_of(p->rate, m->adam_from);
        snprintf(p->key, sizeof(p->key), "adam.%d", m->updates[i].threads);
    }
    return all;
}

static const char *source_name(enum mt_rate_source s)
{
    return s == MT_RATE_MEASURED ? "measured" : "rated";
}

/* In quotes if it would be read as something else without. */
static void print_value(struct mt_str *out, const char *key, const char *text)
{
    size_t n = strlen(text);
    bool blank = n && (isspace((unsigned char)text[0]) || isspace((unsigned char)text[n - 1]));
    const char *quote = (blank || strchr(text, ';')) && !strchr(text, '"') ? "\"" : "";
    mt_str_printf(out, "%s = %s%s%s", key, quote, text, quote);
}

static void print_text(struct mt_str *out, const char *key, const char *text)
{
    print_value(out, key, text);
    mt_str_printf(out, "\n");
}

/* Without the end of the line. In quotes where the source would be read as something else without. */
static void print_rate(struct mt_str *out, const char *key, struct mt_rate r, const char *from)
{
    char text[MT_MAX_FROM + 48];
    from = source_of(r, from);
    snprintf(text, sizeof(text), "%.6g %s%s%s", r.value, source_name(r.source), from[0] ? ": " : "", from);
    print_value(out, key, text);
}

void mt_machine_print(const struct mt_machine *m, struct mt_str *out)
{
    const char *section = "";
    mt_str_printf(out, "[machine]\nversion = %d\n", MT_MACHINE_VERSION);
    print_text(out, "name", m->name);
    mt_str_printf(out, "kind = %s\n", mt_machine_device_kind(m));
    if (m->gpu[0])
        print_text(out, "gpu", m->gpu);
    if (m->fingerprint[0])
        print_text(out, "fingerprint", m->fingerprint);
    for (int i = 0; i < MT_N_RATES; i++) {
        if (m->rate[i].source == MT_RATE_NONE)
            continue;
        if (strcmp(section, rate_keys[i].section))
            mt_str_printf(out, "\n[%s]\n", rate_keys[i].section);
        section = rate_keys[i].section;
        print_rate(out, rate_keys[i].key, m->rate[i], m->from[i]);
        mt_str_printf(out, "%s%s\n", rate_keys[i].unit[0] ? " ; " : "", rate_keys[i].unit);
    }
    mt_str_printf(out, "\n[adam]\n");
    for (int i = 0; i < m->n_updates; i++) {
        const struct mt_update_sample *s = &m->updates[i];
        char threads[16];
        snprintf(threads, sizeof(threads), "%d", s->threads);
        if (s->name[0]) {
            mt_str_printf(out, "%s%s/%s = %.6g measured\n", i && s[-1].name[0] ? "" : "\n[updates]\n", s->name, threads, s->ns);
            continue;
        }
        print_rate(out, threads, (struct mt_rate){s->ns, m->adam_source}, m->adam_from);
        mt_str_printf(out, " ; ns a parameter\n");
    }
    if (m->n_samples)
        mt_str_printf(out, "\n[ops]\n");
    for (size_t i = 0; i < m->n_samples; i++) {
        char key[160];
        mt_operation_format(key, sizeof(key), &m->samples[i].op);
        mt_str_printf(out, "%s = %.6e\n", key, m->samples[i].seconds);
    }
}

void mt_machine_to_json(const struct mt_machine *m, cJSON *o)
{
    cJSON *section = NULL;
    mt_json_put(o, "name=%s, fingerprint=%s", m->name, m->fingerprint);
    for (int i = 0; i < MT_N_RATES; i++) {
        if (m->rate[i].source == MT_RATE_NONE)
            continue;
        section = mt_json_get(o, rate_keys[i].section);
        if (!section)
            section = cJSON_AddObjectToObject(o, rate_keys[i].section);
        cJSON *r = cJSON_AddObjectToObject(section, rate_keys[i].key);
        mt_json_put(r, "value=%f, unit=%s, source=%s", m->rate[i].value, rate_keys[i].unit,
                    source_name(m->rate[i].source));
        if (source_of(m->rate[i], m->from[i])[0])
            cJSON_AddStringToObject(r, "from", m->from[i]);
    }
    cJSON *adam = cJSON_AddObjectToObject(o, "adam_ns"), *ops = cJSON_AddObjectToObject(o, "ops");
    cJSON *updates = cJSON_AddObjectToObject(o, "updates_ns");
    for (int i = 0; i < m->n_updates; i++) {
        const char *name = m->updates[i].name;
        char key[MT_OPTIMIZER_NAME + 16];
        snprintf(key, sizeof(key), "%s%s%d", name, *name ? "/" : "", m->updates[i].threads);
        cJSON_AddNumberToObject(*name ? updates : adam, key, m->updates[i].ns);
    }
    for (size_t i = 0; i < m->n_samples; i++) {
        char key[160];
        mt_operation_format(key, sizeof(key), &m->samples[i].op);
        cJSON_AddNumberToObject(ops, key, m->samples[i].seconds);
    }
}

int mt_machine_write(const struct mt_machine *m, const char *path, struct mt_err *err)
{
    MT_STR_FREED struct mt_str s = {0};
    int rc = mt_make_parent(path, err);
    mt_machine_print(m, &s);
    return rc ?: s.failed ? mt_fail_nomem(err, path, s.len) : mt_write_file(path, s.p, s.len, err);
}

void mt_machine_cache_path(char *buf, size_t len, const char *kind, int threads)
{
    char dir[4096];
    mt_cache_dir(dir, sizeof(dir));
    mt_path_printf(buf, len, "%s/machine-%s-%d.ini", dir, kind, threads);
}

/* Instructions that rates depend on: a virtual machine or a setting may hide those that a model of processor has. */
static const char *const features[] = {"avx2", "avx512f", "avx512_bf16", "amx_bf16", "asimd", "bf16", "sve"};

/* Adds those of the features that a line of flags names. */
static void add_features(char *buf, size_t len, const char *flags)
{
    for (size_t i = 0; i < MT_ARRAY_LEN(features); i++) {
        size_t n = strlen(features[i]), at = strlen(buf);
        const char *found = flags;
        while ((found = strstr(found, features[i])) && (found[-1] != ' ' || !strchr(" \n", found[n])))
            found += n;
        if (found && at < len)
            snprintf(buf + at, len - at, " %s", features[i]);
    }
}

void mt_machine_processor(char *buf, size_t len, FILE *cpuinfo)
{
    MT_FREED char *line = NULL;
    char name[80] = "processor", has[96] = "";
    size_t size = 0;
    bool named = false, listed = false;
    while (cpuinfo && !(named && listed) && getline(&line, &size, cpuinfo) > 0) {
        const char *value = strchr(line, ':');
        if (!value)
            continue;
        if (!named && !strncmp(line, "model name", 10) && value[1]) {
            snprintf(name, sizeof(name), "%.*s", (int)strcspn(value + 2, "\n"), value + 2);
            named = true;
        }
        if (!listed && (!strncmp(line, "flags", 5) || !strncmp(line, "Features", 8))) {
            add_features(has, sizeof(has), value + 1);
            listed = true;
        }
    }
    snprintf(buf, len, "%s%s%s%s", name, has[0] ? " (" : "", has[0] ? has + 1 : "", has[0] ? ")" : "");
}

void mt_machine_fingerprint(char *buf, size_t len, const char *device_name, int threads)
{
    char cpu[192];
    struct mt_hw_memory mem = {0};
    MT_STREAM_CLOSED FILE *f = fopen("/proc/cpuinfo", "re");
    mt_hw_memory(&mem, "", NULL);
    mt_machine_processor(cpu, sizeof(cpu), f);
    snprintf(buf, len, "%s, %d threads, %.0f GiB, %s", cpu, threads,
             ceil((double)mem.total / (double)(1 << 30)), device_name);
}

int mt_machine_load_cached(struct mt_machine *out, const char *kind, const char *device_name,
                           int threads, struct mt_err *err)
{
    char path[4096], now[256];
    MT_CLOSED_BY(mt_machine_finish) struct mt_machine m = {0};
    mt_machine_cache_path(path, sizeof(path), kind, threads);
    if (!mt_path_exists(path))
        return mt_fail(err, MT_ERR_RUNTIME, -ENOENT,
                       "this machine has not been measured with device %s and %d threads: megatrain probe all "
                       "--device %s --threads %d", kind, threads, kind, threads);
    int rc = mt_machine_read(&m, path, err);
    if (rc)
        return rc;
    mt_machine_fingerprint(now, sizeof(now), device_name, threads);
    if (strcmp(now, m.fingerprint))
        return mt_fail(err, MT_ERR_RUNTIME, -ESTALE,
                       "%s was measured on other hardware (%s; this is %s): run megatrain probe all again", path,
                       m.fingerprint, now);
    *out = MT_GIVE(m);
    return 0;
}

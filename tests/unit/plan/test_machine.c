/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/fs.h"
#include "base/json.h"
#include "base/mem.h"
#include "machine/machine.h"
#include "plan/search.h"
#include "shapes.h"
#include "test.h"

static const char good[] = "[machine]\nversion = 1\nname = a machine\nkind = cuda\n"
                           "[compute]\ngemm_bf16_tflops = 100 rated\ngemm_f32_tflops = 20 measured\n"
                           "memory_gbs = 900 rated\nmemory_gib = 24 rated\n"
                           "[link]\nh2d_gbs = 25 measured ; GB/s\nd2h_gbs = 24 measured\n"
                           "[host]\ncores = 8 rated\nmemory_gib = 64 rated\ndram_gbs = 60 rated\n"
                           "[adam]\n4 = 0.8 measured\n1 = 2.4 measured\n"
                           "[ops]\ngemm_nt.bf16.0.256x512x128:33554432:720896 = 2.5e-4\n";

#define assert_near(a, b) assert_true(fabs((a) - (b)) < 1e-9)

static int read_text(struct mt_machine *m, const char *text, struct mt_err *err)
{
    char path[] = "/tmp/mt-machine-XXXXXX";
    int fd = mkstemp(path);
    assert_true(fd >= 0);
    assert_int_equal(mt_write_all(fd, text, strlen(text)), 0);
    close(fd);
    int rc = mt_machine_read(m, path, err);
    unlink(path);
    return rc;
}

TEST(a_profile_reads_back_as_it_was_written)
{
    MT_CLOSED_BY(mt_machine_finish) struct mt_machine a = {0}, b = {0};
    MT_STR_FREED struct mt_str text = {0}, again = {0};
    MUST(read_text, &a, good);
    assert_int_equal(a.rate[MT_RATE_H2D].source, MT_RATE_MEASURED);
    assert_int_equal(a.rate[MT_RATE_GEMM_BF16].source, MT_RATE_RATED);
    assert_int_equal(a.n_updates, 2);
    assert_int_equal(a.updates[0].threads, 1); /* sorted */
    mt_machine_print(&a, &text);
    MUST(read_text, &b, text.p);
    mt_machine_print(&b, &again);
    assert_string_equal(text.p, again.p);
    assert_int_equal(b.n_samples, 1);
    assert_true(mt_same_operation(&a.samples[0].op, &b.samples[0].op));
}

TEST(as_json_a_profile_has_its_samples_by_name)
{
    MT_CLOSED_BY(mt_machine_finish) struct mt_machine m = {0};
    MT_JSON_FREED cJSON *o = cJSON_CreateObject();
    char ini[1000];
    const char *ops = strstr(good, "[ops]");
    snprintf(ini, sizeof(ini), "%.*s[updates]\nlion/4 = 0.6 measured\n%s", (int)(ops - good), good, ops);
    MUST(read_text, &m, ini);
    mt_machine_to_json(&m, o);
    const cJSON *adam = mt_json_get(o, "adam_ns"), *updates = mt_json_get(o, "updates_ns"), *all = mt_json_get(o, "ops");
    assert_int_equal(cJSON_GetArraySize(adam) + cJSON_GetArraySize(updates) + cJSON_GetArraySize(all), 4);
    assert_near(mt_json_number(adam, "1", 0), 2.4);
    assert_near(mt_json_number(adam, "4", 0), 0.8);
    assert_near(mt_json_number(updates, "lion/4", 0), 0.6);
    assert_near(mt_json_number(all, "gemm_nt.bf16.0.256x512x128:33554432:720896", 0), 2.5e-4);
}

TEST(sources_read_back_as_they_were_written)
{
    static const char *const sources[] = {"\"25 rated: a sheet; the second\"", "25 rated: a sheet: 31.5", "\"25 rated: a;b\""};
    for (size_t i = 0; i < sizeof(sources) / sizeof(*sources); i++) {
        MT_CLOSED_BY(mt_machine_finish) struct mt_machine a = {0}, b = {0};
        MT_STR_FREED struct mt_str text = {0};
        char ini[1000];
        const char *rest = strstr(good, "d2h_gbs");
        snprintf(ini, sizeof(ini), "%.*sd2h_gbs = %s\n%s", (int)(rest - good), good, sources[i], strstr(rest, "[host]"));
        MUST(read_text, &a, ini);
        mt_machine_print(&a, &text);
        MUST(read_text, &b, text.p);
        assert_string_equal(a.from[MT_RATE_D2H], b.from[MT_RATE_D2H]);
        assert_non_null(strstr(sources[i], a.from[MT_RATE_D2H]));
        assert_int_equal(a.rate[MT_RATE_D2H].source, MT_RATE_RATED);
    }
}

/* Also where a blank or a semicolon would be taken for the end of the value. */
TEST(names_read_back_as_they_were_written)
{
    static const char *const names[] = {"\" a card\"", "\"a card; the second\"", "\"; card\"", "a card;the second", "a \"card\";two"};
    for (size_t i = 0; i < sizeof(names) / sizeof(*names); i++) {
        MT_CLOSED_BY(mt_machine_finish) struct mt_machine a = {0}, b = {0};
        MT_STR_FREED struct mt_str text = {0};
        char ini[1000];
        snprintf(ini, sizeof(ini), "[machine]\nversion = 1\nname = %s\n%s", names[i], strstr(good, "kind"));
        MUST(read_text, &a, ini);
        mt_machine_print(&a, &text);
        MUST(read_text, &b, text.p);
        assert_string_equal(a.name, b.name);
    }
}

TEST(every_bad_line_is_named)
{
    static const struct {
        const char *line, *word;
    } bad[] = {{"[host]\ncores = 8\n", "rated or measured"},
               {"[host]\ncores = many rated\n", "rated or measured"},
               {"[host]\ncores = -1 rated\n", "rated or measured"},
               {"[link]\nspeed = 3 rated\n", "link.speed"},
               {"[machine]\nkind = tpu\n", "cpu or cuda"},
               {"[machine]\ngpu = 0123456789012345678901234567890123456789012345678901234567890123\n", "more than 63 bytes"},
               {"[adam]\nzero = 1 rated\n", "[adam]"},
               {"[ops]\ngemm_xx.bf16.0.1x1x1:2:6 = 1\n", "OPERATION = SECONDS"},
               {"[ops]\ngemm_nt.bf16.0.1x1x1:2:6 = 0\n", "OPERATION = SECONDS"}};
    for (size_t i = 0; i < sizeof(bad) / sizeof(*bad); i++) {
        struct mt_machine m;
        struct mt_err err = {0};
        assert_true(read_text(&m, bad[i].line, &err) < 0);
        if (!strstr(err.msg, bad[i].word) || !strstr(err.msg, ":2:"))
            fail_msg("%s gives \"%s\"", bad[i].line, err.msg);
    }
}

TEST(another_version_and_a_missing_rate_are_refused)
{
    struct mt_machine m;
    struct mt_err err = {0};
    char text[sizeof(good)];
    memcpy(text, good, sizeof(good));
    memcpy(strstr(text, "version = 1"), "version = 9", 11);
    assert_int_equal(read_text(&m, text, &err), -ESTALE);
    memcpy(text, good, sizeof(good));
    memcpy(strstr(text, "dram_gbs = 60"), "dram_gbs = 00", 13);
    assert_int_equal(read_text(&m, text, &err), -EINVAL);
    assert_non_null(strstr(err.msg, "dram_gbs"));
}

TEST(a_profile_of_other_hardware_is_not_used)
{
    char dir[] = "/tmp/mt-cache-XXXXXX", path[4096];
    struct mt_machine m, got;
    struct mt_err err = {0};
    assert_non_null(mkdtemp(dir));
    setenv("XDG_CACHE_HOME", dir, 1);
    assert_int_equal(mt_machine_load_cached(&got, "cpu", "device", 2, &err), -ENOENT);
    assert_non_null(strstr(err.msg, "probe all"));
    MUST(read_text, &m, good);
    mt_machine_cache_path(path, sizeof(path), "cpu", 2);
    snprintf(m.fingerprint, sizeof(m.fingerprint), "another machine");
    MUST(mt_machine_write, &m, path);
    assert_int_equal(mt_machine_load_cached(&got, "cpu", "device", 2, &err), -ESTALE);
    mt_machine_fingerprint(m.fingerprint, sizeof(m.fingerprint), "device", 2);
    MUST(mt_machine_write, &m, path);
    MUST(mt_machine_load_cached, &got, "cpu", "device", 2);
    assert_string_equal(got.name, "a machine");
    mt_machine_finish(&got);
    assert_int_equal(mt_machine_load_cached(&got, "cpu", "another device", 2, &err), -ESTALE);
    mt_machine_finish(&m);
    mt_remove_tree(dir, NULL);
}

/* A virtual machine may hide instructions of its processor: a rate measured with them holds for no other. */
TEST(a_processor_is_known_by_its_instructions)
{
#define CPU(flags) "processor\t: 0\nmodel name\t: A CPU @ 2GHz\nflags\t\t: fpu " flags " lahf_lm\n\nmodel name\t: another\n"
    static const struct {
        const char *text, *want;
    } cases[] = {
        {CPU("avx2 avx512f avx512_bf16 amx_bf16 amx_tile"), "A CPU @ 2GHz (avx2 avx512f avx512_bf16 amx_bf16)"},
        {CPU("avx2 avx512f avx512_bf16"), "A CPU @ 2GHz (avx2 avx512f avx512_bf16)"},
        {CPU("avx512fp16 avx2"), "A CPU @ 2GHz (avx2)"},
        {"model name : plain\nflags : fpu\n", "plain"},
        {"processor : 0\nFeatures\t: fp asimd sve bf16\n", "processor (asimd bf16 sve)"},
        {"flags :avx2\n", "processor"},
        {"", "processor"},
    };
    for (size_t i = 0; i < MT_ARRAY_LEN(cases); i++) {
        char got[192];
        FILE *f = tmpfile();
        assert_non_null(f);
        fputs(cases[i].text, f);
        rewind(f);
        mt_machine_processor(got, sizeof(got), f);
        fclose(f);
        assert_string_equal(got, cases[i].want);
    }
}

static struct mt_metered gemm(uint64_t m, uint64_t n, uint64_t k)
{
    return (struct mt_metered){.op = MT_DEV_GEMM, .variant = MT_GEMM_NT, .dtype = MT_BF16, .n_dims = 3, .dim = {m, n, k},
                               .flops = 2.0 * (double)(m * n * k),
                               .bytes = 2.0 * (double)(m * k + k * n + m * n)};
}

TEST(a_sample_is_exact_and_between_samples_rates_lie_between)
{
    MT_CLOSED_BY(mt_machine_finish) struct mt_machine m = make_machine(24, 64, 0);
    struct mt_metered a = gemm(256, 256, 256), b = gemm(4096, 4096, 4096), mid = gemm(1024, 1024, 1024);
    assert_true(mt_machine_add_sample(&m, &a, a.flops / 10e12));
    assert_true(mt_machine_add_sample(&m, &b, b.flops / 90e12));
    assert_true(fabs(mt_machine_op_seconds(&m, &a) / (a.flops / 10e12) - 1) < 1e-9);
    double rate = mid.flops / mt_machine_op_seconds(&m, &mid) * 1e-12;
    assert_true(rate > 10 && rate < 90);
    assert_true(fabs(rate / 30 - 1) < 0.01); /* halfway in logarithms */
    assert_true(mt_machine_add_sample(&m, &a, a.flops / 20e12)); /* replaces */
    assert_int_equal(m.n_samples, 2);
    struct mt_metered f32 = a; /* no sample of its kind: the machine's rate */
    f32.dtype = MT_F32;
    assert_true(fabs(mt_machine_op_seconds(&m, &f32) / (f32.flops / 50e12) - 1) < 0.01);
}

/* 96 tiles of 64 by 128 on 128 multiprocessors; and 4,096 of 128 by 128, which are 32 whole waves. */
TEST(a_product_of_few_tiles_leaves_multiprocessors_idle)
{
    MT_CLOSED_BY(mt_machine_finish) struct mt_machine m = make_machine(24, 64, 0);
    struct mt_metered expert = gemm(512, 1536, 2048), dense = gemm(16384, 4096, 4096);
    double fixed = m.rate[MT_RATE_OP_US].value * 1e-6, few = mt_machine_op_seconds(&m, &expert) - fixed;
    double many = mt_machine_op_seconds(&m, &dense);
    m.rate[MT_RATE_MULTIPROCESSORS].value = 128;
    assert_true(fabs((mt_machine_op_seconds(&m, &expert) - fixed) / few - 128.0 / 96) < 1e-6);
    assert_near(mt_machine_op_seconds(&m, &dense), many);
    expert.beside = 2; /* 192 tiles: two waves of 256 for two products; and one starts under the other */
    assert_true(fabs((mt_machine_op_seconds(&m, &expert) - fixed / 2) / few - 128.0 / 96) < 1e-6);
    expert.beside = 4; /* 384 tiles: three waves for four products, all full */
    assert_true(fabs((mt_machine_op_seconds(&m, &expert) - fixed / 4) / few - 1) < 1e-6);
    expert.beside = 1; /* the same as one operation */
    expert.flops *= 4;
    assert_true(fabs((mt_machine_op_seconds(&m, &expert) - fixed) / (4 * few) - 1) < 1e-6);
}

static struct mt_metered attention(uint64_t len, uint64_t heads, uint64_t width)
{
    struct mt_metered op = {.op = MT_DEV_ATTENTION, .dtype = MT_BF16, .n_dims = 6,
                            .dim = {4096, len, heads, 4, width, width}};
    mt_metered_count(&op);
    return op;
}

TEST(heads_twice_as_wide_are_as_far_as_twice_the_heads)
{
    MT_CLOSED_BY(mt_machine_finish) struct mt_machine m = make_machine(24, 64, 0);
    struct mt_metered a = attention(512, 8, 64), b = attention(2048, 8, 64);
    struct mt_metered wide = attention(512, 8, 128), many = attention(512, 16, 64);
    assert_true(mt_machine_add_sample(&m, &a, a.flops / 10e12));
    assert_true(mt_machine_add_sample(&m, &b, b.flops / 90e12));
    double rate = wide.flops / mt_machine_op_seconds(&m, &wide), other = many.flops / mt_machine_op_seconds(&m, &many);
    assert_true(fabs(rate / other - 1) < 1e-9);
}

TEST(the_optimizer_slows_down_with_fewer_threads)
{
    MT_CLOSED_BY(mt_machine_finish) struct mt_machine m = {0};
    MUST(read_text, &m, good);
    assert_true(fabs(mt_machine_update_ns(&m, 1) - 2.4) < 1e-9);
    assert_true(fabs(mt_machine_update_ns(&m, 4) - 0.8) < 1e-9);
    assert_true(fabs(mt_machine_update_ns(&m, 16) - 0.8) < 1e-9); /* more threads were not measured: assumed no faster */
    double two = mt_machine_update_ns(&m, 2);
    assert_true(two > 0.8 && two < 2.4);
}

static double optimizer_ns(const struct mt_machine *m, const struct mt_optimizer *o, enum mt_dtype grad, int threads)
{
    return mt_machine_optimizer_ns(m, &(struct mt_numerics){.optimizer = o, .grad_dtype = grad}, threads);
}

/* Measured: interpolated, for bf16 gradients. Else by bytes, or by instructions where those take longer. */
TEST(an_update_is_priced_by_its_own_optimizer)
{
    MT_CLOSED_BY(mt_machine_finish) struct mt_machine m = {0}, again = {0};
    MT_STR_FREED struct mt_str text = {0};
    const struct mt_optimizer *lean = mt_optimizer_find("adamw", MT_STATE_8BIT, NULL);
    const struct mt_optimizer *sgd = mt_optimizer_find("sgd", MT_STATE_F32, NULL);
    assert_int_equal(read_text(&m, good, NULL), 0);
    assert_near(optimizer_ns(&m, &mt_adamw, MT_BF16, 4), 0.8);
    assert_near(optimizer_ns(&m, sgd, MT_BF16, 4), 0.8 * 10 / 26);
    assert_near(optimizer_ns(&m, lean, MT_BF16, 4), 0.8 * 14.25 / 26);
    m.updates[1].ns = 0.1;
    assert_near(optimizer_ns(&m, lean, MT_BF16, 4), 1.25 / 4);
    assert_true(mt_machine_add_update(&m, "sgd/none", 8, 0.2) && mt_machine_add_update(&m, "adamw/8bit", 4, 0.6) &&
                mt_machine_add_update(&m, "adamw/8bit", 1, 2) && mt_machine_add_update(&m, "adamw/8bit", 1, 1.8));
    assert_near(optimizer_ns(&m, lean, MT_BF16, 2), 1.8 - 1.2 / 3);
    assert_near(optimizer_ns(&m, sgd, MT_F32, 8), 0.2 * 12 / 10);
    struct mt_numerics few = {.optimizer = lean, .grad_dtype = MT_BF16, .master = MT_MASTER_24BIT};
    assert_near(mt_machine_optimizer_ns(&m, &few, 4), 0.6 * 12.25 / 14.25);
    few.master = MT_MASTER_BF16; /* bound by its random numbers */
    m.updates[3].ns = 0.1;
    assert_near(mt_machine_optimizer_ns(&m, &few, 4), mt_optimizer_thread_ns(lean, MT_MASTER_BF16) / 4);
    m.updates[3].ns = 0.6;
    assert_true(mt_machine_add_update(&m, "adamw/8bit/bf16", 4, 0.5)); /* measured itself */
    assert_near(mt_machine_optimizer_ns(&m, &few, 4), 0.5);
    few.grad_dtype = MT_F32;
    assert_near(mt_machine_optimizer_ns(&m, &few, 4), 0.5 * 12.25 / 10.25);
    struct mt_numerics rounded = {.optimizer = mt_optimizer_find("lion", MT_STATE_BF16, NULL), .grad_dtype = MT_BF16,
                                  .rounding = MT_ROUND_STOCHASTIC};
    assert_true(mt_machine_add_update(&m, "lion/bf16", 4, 0.3));
    assert_near(mt_machine_optimizer_ns(&m, &rounded, 4), 0.3);
    assert_true(mt_machine_add_update(&m, "lion/bf16/stochastic", 4, 0.4));
    assert_near(mt_machine_optimizer_ns(&m, &rounded, 4), 0.4);
    assert_near(optimizer_ns(&m, rounded.optimizer, MT_BF16, 4), 0.3);
    mt_machine_print(&m, &text);
    assert_int_equal(read_text(&again, text.p, NULL), 0);
    assert_int_equal(again.n_updates, 8); /* and two of AdamW */
    assert_near(mt_machine_optimizer_ns(&again, &rounded, 4), 0.4);
    few.grad_dtype = MT_BF16;
    assert_near(mt_machine_optimizer_ns(&again, &few, 4), 0.5);
    assert_near(optimizer_ns(&again, lean, MT_BF16, 2), 1.8 - 1.2 / 3);
}

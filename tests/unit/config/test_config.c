/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/fs.h"
#include "base/mem.h"
#include "config/config.h"
#include "config/schema.h"
#include "test.h"

static char dir[64];

/* What check_keys() wants; cases stand behind it. */
#define WHOLE "[model]\npath = m\n[data]\ntrain = d.jsonl\n[train]\nsteps = 3\nbatch_size = 4\n"

static int set_up(void **)
{
    snprintf(dir, sizeof(dir), "/tmp/mt-config-XXXXXX");
    return mkdtemp(dir) ? 0 : -1;
}

static int tear_down(void **)
{
    return mt_remove_tree(dir, NULL);
}

static const char *put(const char *name, const char *text)
{
    static char path[2][256];
    static int k;
    char *p = path[k++ % 2];
    snprintf(p, 256, "%s/%s", dir, name);
    assert_int_equal(mt_write_file(p, text, strlen(text), NULL), 0);
    return p;
}

static struct mt_config *load(const char *text)
{
    struct mt_config *c = NULL;
    MUST(mt_config_load, &c, put("run.ini", text), NULL, 0);
    return c;
}

static struct mt_config *load_sets(const char *const *sets, int n)
{
    struct mt_config *c = NULL;
    MUST(mt_config_load, &c, NULL, sets, n);
    return c;
}

/* The text is refused as a usage error whose message has all the words. */
static void refuse(const char *text, const char *const words[4])
{
    struct mt_config *c = NULL;
    struct mt_err err = {0};
    int rc = mt_config_load(&c, put("run.ini", text), NULL, 0, &err);
    if (!rc)
        fail_msg("accepted: %s", text);
    assert_null(c);
    assert_int_equal(err.kind, MT_ERR_USAGE);
    assert_int_equal(err.code, rc);
    for (int i = 0; i < 4 && words[i]; i++)
        if (!strstr(err.msg, words[i]))
            fail_msg("\"%s\" does not say \"%s\"", err.msg, words[i]);
}

static void refuse_set(const char *set, const char *word)
{
    struct mt_config *c = NULL;
    struct mt_err err = {0};
    if (!mt_config_load(&c, NULL, &set, 1, &err))
        fail_msg("accepted: %s", set);
    assert_null(c);
    assert_int_equal(err.kind, MT_ERR_USAGE);
    if (!strstr(err.msg, word))
        fail_msg("\"%s\" does not say \"%s\"", err.msg, word);
}

TEST(every_error_has_its_line_and_reason)
{
    static const struct {
        const char *text, *words[4];
    } cases[] = {
        {"[train]\nlearing_rate = 1\n", {"run.ini:2", "train.learing_rate", "did you mean \"learning_rate\""}},
        {"[train]\nzzzzzzzzz = 1\n", {"run.ini:2", "unknown key \"train.zzzzzzzzz\""}},
        {"[train]\nlabel_smoothing = 0.1\n", {"unknown key", "not supported, but of preferences"}},
        {"[train]\nneftune_alpha = 5\n", {"unknown key", "NEFTune"}},
        {"[train]\nlr = 1\n", {"run.ini:2", "unknown key \"train.lr\"", "here it is train.learning_rate"}},
        {"[train]\nnum_train_epochs = 1\n", {"run.ini:2", "here it is train.epochs"}},
        {"[optimizer]\nlearning_rate = 1\n", {"run.ini:2", "here it is train.learning_rate"}},
        {"[peft]\nlora_alpha = 1\n", {"run.ini:2", "here it is adapter.alpha"}},
        {"[train]\nneftune_noise_alpha = 5\n", {"run.ini:2", "NEFTune", "not supported"}},
        {"\n\n[trian]\nsteps = 1\n", {"run.ini:4", "unknown section", "did you mean \"train\""}},
        {"[lora]\nr = 8\n", {"run.ini:2", "\"lora.r\"", "here it is adapter.rank"}}, /* though "log" is near */
        {"[train]\nsteps = 1\nsteps = 2\n", {"run.ini:3", "appears twice", "line 2"}},
        {"[train]\n[data]\n[train]\n", {"run.ini:3", "duplicate section [train]"}},
        {"steps = 1\n", {"run.ini:1", "is in no section"}},
        {"[train\nsteps = 1\n", {"run.ini:1", "a section must be [name]"}},
        {"[train] x\nsteps = 1\n", {"run.ini:1", "a section must be [name]"}},
        {"[train]\nsteps\n", {"run.ini:2", "neither [section] nor key = value"}},
        {"base_model: x\nlora_r: 8\n", {"run.ini:1", "looks like YAML", "config init"}},
        {"[adapter]\nkind = qlora\n", {"run.ini:2", "none|lora|dora", "what others call so is lora, with model.base_dtype = nf4"}},
        {"[model]\npath = \"abc\n", {"run.ini:2", "quote that is not closed"}},
        {"[model]\npath = \"abc\" def\n", {"run.ini:2", "text after a closing quote"}},
        {"[model]\npath = ${MT_TEST_NO_SUCH}\n", {"run.ini:2", "MT_TEST_NO_SUCH is not set", "${MT_TEST_NO_SUCH:-value}"}},
        {"[model]\npath = ${HOME\n", {"run.ini:2", "without \"}\""}},
        {"[model]\npath = ${}\n", {"run.ini:2", "variable without a name"}},
        {"[model]\npath = ${:-x}\n", {"run.ini:2", "variable without a name"}},
        {"include = nowhere.ini\n", {"run.ini:1", "does not exist", "nowhere.ini"}},
        {"include = run.ini\n", {"run.ini:1", "does a file include itself?"}},
        {"[train]\nsteps = soon\n", {"run.ini:2", "train.steps = \"soon\"", "whole number"}},
        {"[train]\nsteps = 1.5\n", {"run.ini:2", "whole number"}},
        {"[train]\nsteps = -1\n", {"run.ini:2", "between 0 and"}},
        {"[train]\nsteps = 0x10\n", {"run.ini:2", "whole number"}},
        {"[train]\nsteps = 1 k 2\n", {"run.ini:2", "whole number"}},
        {"[train]\nsteps = 1e300\n", {"run.ini:2", "whole number"}},
        {"[train]\nsteps = nan\n", {"run.ini:2", "whole number"}},
        {"[train]\nlearning_rate = fast\n", {"run.ini:2", "must be a number"}},
        {"[train]\nlearning_rate = inf\n", {"run.ini:2", "must be a number"}},
        {"[train]\nlearning_rate = 1e-3x\n", {"run.ini:2", "must be a number"}},
        {"[train]\nmin_lr_ratio = 2\n", {"run.ini:2", "between 0 and 1"}},
        {"[train]\nschedule = cosin\n", {"run.ini:2", "constant|linear|cosine|wsd"}},
        {"[train]\nschedule = cosine|linear\n", {"run.ini:2", "constant|linear|cosine|wsd"}},
        {"[train]\nschedule =\n", {"run.ini:2", "constant|linear|cosine|wsd"}},
        {"[train]\nwarmup = 101%\n", {"run.ini:2", "between 0% and 100%"}},
        {"[train]\nwarmup = -1%\n", {"run.ini:2", "between 0% and 100%"}},
        {"[data]\npacking = maybe\n", {"run.ini:2", "on or off"}},
        {"[memory]\ndevice_budget = 20\n", {"run.ini:2", "a size with a unit"}},
        {"[memory]\ndevice_budget = 20GX\n", {"run.ini:2", "a size with a unit"}},
        {"[memory]\ndevice_budget = 120%\n", {"run.ini:2", "a size with a unit"}},
        {"[memory]\ndevice_budget = -1GiB\n", {"run.ini:2", "a size with a unit"}},
        {"[memory]\nslots = 1\n", {"run.ini:2", "between 2 and 32767"}},
        {"[checkpoint]\nevery = often\n", {"run.ini:2", "steps, or a duration"}},
        {"[checkpoint]\nevery = 1e30\n", {"run.ini:2", "steps, or a duration"}},
        {"[checkpoint]\nevery = 30x\n", {"run.ini:2", "steps, or a duration"}},
        {"[checkpoint]\ntime_limit = 12\n", {"run.ini:2", "a duration with units"}},
        {"[checkpoint]\ntime_limit = -3h\n", {"run.ini:2", "a duration with units"}},
        {"[checkpoint]\nshard_size = 5\n", {"run.ini:2", "a size with a unit"}},
        {"[checkpoint]\nshard_size = -5GB\n", {"run.ini:2", "size with a unit"}},
        {"[checkpoint]\nshard_size = 1e300GB\n", {"run.ini:2", "a size with a unit"}},
        {"[optimizer]\ntype = lamb\n", {"run.ini:2", "adamw|lion|sgd"}},
        {"[model]\nfreeze = ,; a\"b\n", {"run.ini:2", "must not contain a quote"}},
        {"[model]\nfreeze = , \"a\n", {"run.ini:2", "must not contain a quote"}},
        {"[eval]\nsets = ok:a, a23456789b23456789c23456789d23456789e2345:b\n", {"run.ini:2", "a name of 41 characters", "at most 40"}},
        {"[data]\ntrain = a, ~/b\n", {"run.ini:2", "write ${HOME}/b"}},
        {"[eval]\nsets = a:~/b\n", {"run.ini:2", "write ${HOME}/b"}},
        {"[optimizer]\ntype = apollo\nrank = 1.5\n", {"run.ini:3", "optimizer.rank", "whole number"}},
        {"[optimizer]\nprojection_gap = 2.5\n", {"run.ini:2", "optimizer.projection_gap", "whole number"}},
        {"[optimizer]\nprojection_gap = 0\n", {"run.ini:2", "between 1 and"}},
        {"[checkpoint]\ndir = out # mine\n", {"run.ini:2", "begins with ;", "in quotes: \"out # mine\""}},
        {"[checkpoint]\ndir = # none\n", {"run.ini:2", "begins with ;"}},
        {"[data]\nseq_len =\n", {"run.ini:2", "a number is missing", "4096"}},
        {"[optimizer]\neps = ; small\n", {"run.ini:2", "a number is missing"}},
        {"[optimizer]\nbeta2 = 1\n", {"run.ini:2", "between 0 and"}},
        {"[data]\ntrain = d\n[train]\nsteps = 1\nbatch_size = 1\n", {"model.path is not set"}},
        {"[model]\npath = m\n[train]\nsteps = 1\nbatch_size = 1\n", {"data.train is not set"}},
        {"[model]\npath = m\n[data]\ntrain = d\n[train]\nbatch_size = 1\n", {"exactly one of train.steps, train.epochs and train.tokens", "none is set"}},
        {"[model]\npath = m\n[data]\ntrain = d\n[train]\nsteps = 1\nepochs = 2\nbatch_size = 1\n", {"exactly one of", "more than one"}},
        {"[model]\npath = m\n[data]\ntrain = d\n[train]\nbatch_size = 1\nepochs = 0\n", {"none is set: train.epochs is 0 or empty in ", "run.ini:7"}},
        {"[model]\npath = m\n[data]\ntrain = d\n[train]\nsteps = 1\n", {"exactly one of train.tokens_per_step and train.batch_size"}},
        {WHOLE "[memory]\nlogits_chunk = 100\n", {"multiple of 64"}},
    };
    unsetenv("MT_TEST_NO_SUCH");
    for (size_t i = 0; i < MT_ARRAY_LEN(cases); i++)
        refuse(cases[i].text, cases[i].words);
}

TEST(a_file_that_is_not_text_is_refused)
{
    struct mt_config *c = NULL;
    struct mt_err err = {0};
    char path[256];
    snprintf(path, sizeof(path), "%s/zero.ini", dir);
    assert_int_equal(mt_write_file(path, "[train]\0steps = 1\n", 18, NULL), 0);
    assert_int_equal(mt_config_load(&c, path, NULL, 0, &err), -EINVAL);
    assert_non_null(strstr(err.msg, "not a text file"));
    assert_int_equal(mt_config_load(&c, "/no/such.ini", NULL, 0, &err), -ENOENT);
    assert_int_equal(err.kind, MT_ERR_USAGE);
}

TEST(values_are_read_with_their_units)
{
    struct mt_config *c = load(
        "\xef\xbb\xbf# a comment\r\n; another\n"
        "[model]\npath = m ; a model\nfreeze = model.embed_tokens.* ,, lm_head.*\ndtype = f32\n"
        "[data]\ntrain = \"a ; b # c.jsonl\"\nseq_len = 4Ki\npacking = no\n"
        "[train]\nsteps=10k\nbatch_size = 8 \nwarmup = 7.5%\nlearning_rate = 2.5e-5\nmicro_batch = auto\n"
        "[memory]\ndevice_budget = 1.5GiB\nhost_budget = 80%\n"
        "[checkpoint]\nevery = 1h30m\ntime_limit = 1d2h3m4s\nshard_size = 2 GB\n"
        "[device]\ncpu_threads = 3\n");
    assert_int_equal(c->train.steps, 10000);
    assert_int_equal(c->numerics.seq_len, 4096);
    assert_false(c->data.packing);
    assert_int_equal(c->train.batch_size, 8);
    assert_true(c->train.warmup.is_ratio && c->train.warmup.ratio == 0.075);
    assert_true(c->train.learning_rate == 2.5e-5);
    assert_int_equal(c->numerics.micro_batch, MT_AUTO);
    assert_int_equal(c->placement.device_budget.bytes, UINT64_C(3) << 29);
    assert_true(c->checkpoint.every.is_time && c->checkpoint.every.seconds == 5400);
    assert_true(c->checkpoint.time_limit == 86400 + 7200 + 180 + 4);
    assert_int_equal(c->checkpoint.shard_size, 2000000000);
    assert_int_equal(c->placement.threads, 3);
    assert_int_equal(c->numerics.dtype, MT_F32);
    assert_int_equal(c->model.freeze.n, 2);
    assert_string_equal(c->model.freeze.items[1], "lm_head.*");
    assert_int_equal(c->data.train.n, 1);
    assert_non_null(strstr(c->data.train.items[0], "/a ; b # c.jsonl"));
    mt_config_destroy(&c);
    assert_null(c);
}

TEST(paths_are_relative_to_the_file_that_names_them)
{
    char model[256], inner[256];
    snprintf(model, sizeof(model), "%s/sub/m", dir);
    snprintf(inner, sizeof(inner), "%s/sub/base.ini", dir);
    assert_int_equal(mt_mkdir_p(model, NULL), 0);
    const char *base = "[model]\npath = m\n[data]\ntrain = a.jsonl, /abs/b.jsonl\n[train]\nsteps = 1\nseed = 5\n";
    assert_int_equal(mt_write_file(inner, base, strlen(base), NULL), 0);
    MT_CLOSED_BY(mt_config_destroy) struct mt_config *c =
        load("include = sub/base.ini\n[train]\nbatch_size = 2\nseed = 6\n[checkpoint]\ndir = o\n");
    char want[256];
    snprintf(want, sizeof(want), "%s/sub/m", dir);
    assert_string_equal(c->model.path, want);
    snprintf(want, sizeof(want), "%s/sub/a.jsonl", dir);
    assert_string_equal(c->data.train.items[0], want);
    assert_string_equal(c->data.train.items[1], "/abs/b.jsonl");
    snprintf(want, sizeof(want), "%s/o", dir);
    assert_string_equal(c->checkpoint.dir, want);
    assert_int_equal(c->train.seed, 6); /* later wins over an included value */
    mt_config_destroy(&c);
    c = load("[model]\npath = org/name\n[data]\ntrain = d\n[train]\nsteps = 1\nbatch_size = 1\n");
    assert_string_equal(c->model.path, "org/name"); /* a name of the hub stays */
}

TEST(variables_are_filled_in)
{
    setenv("MT_TEST_VAR", "va;lue", 1);
    unsetenv("MT_TEST_NO_SUCH");
    struct mt_config *c = load("[model]\npath = /x/${MT_TEST_VAR}/${MT_TEST_NO_SUCH:-def}/$y\n[data]\ntrain = d\n"
                               "[train]\nsteps = ${MT_TEST_NO_SUCH:-12}\nbatch_size = 1\n");
    assert_string_equal(c->model.path, "/x/va;lue/def/$y");
    assert_int_equal(c->train.steps, 12);
    mt_config_destroy(&c);
}

/* Also where a folder has that name: beside the file, and where the program was started. */
TEST(a_word_that_is_the_default_is_no_path)
{
    char made[256];
    MT_FREED char *was = getcwd(NULL, 0);
    struct mt_str text = {0};
    snprintf(made, sizeof(made), "%s/start", dir);
    assert_int_equal(mkdir(made, 0777) || chdir(dir), 0);
    struct mt_config *c = load(WHOLE "[preference]\nreference = start\n");
    mt_config_print(c, false, &text);
    assert_non_null(strstr(text.p, "\nreference = start\n"));
    assert_string_equal(c->preference.reference, "start");
    mt_config_destroy(&c);
    c = load(WHOLE "[preference]\nreference = ./start\n");
    assert_non_null(strstr(c->preference.reference, "/./start"));
    mt_config_destroy(&c);
    mt_str_finish(&text);
    assert_int_equal(chdir(was) || rmdir(made), 0);
}

TEST(sets_win_over_the_file)
{
    struct mt_config *c = NULL;
    struct mt_err err = {0};
    struct mt_str text = {0};
    const char *sets[] = {"train.steps=7", "train.steps=9", "model.path=a=b"};
    MUST(mt_config_load, &c, put("run.ini", WHOLE), sets, 3);
    assert_int_equal(c->train.steps, 9);
    assert_string_equal(c->model.path, "a=b");
    mt_config_print(c, true, &text);
    assert_non_null(strstr(text.p, "steps = 9 ; --set"));
    assert_non_null(strstr(text.p, "run.ini:7"));
    assert_non_null(strstr(text.p, "seq_len = 4096 ; default"));
    MUST(mt_config_override, c, "train.micro_batch", "2", "decided");
    assert_int_equal(c->numerics.micro_batch, 2);
    assert_int_equal(mt_config_override(c, "train.nothing", "2", "decided", &err), -EINVAL);
    assert_int_equal(mt_config_override(c, "train.micro_batch", "x", "decided", &err), -EINVAL);
    mt_str_finish(&text);
    mt_config_destroy(&c);
    refuse_set("nonsense", "SECTION.KEY=VALUE");
    refuse_set("train.steps", "SECTION.KEY=VALUE");
    refuse_set("=a.b", "SECTION.KEY=VALUE");
    refuse_set("train.stepz=1", "did you mean \"steps\"");
    refuse_set("trian.steps=1", "did you mean \"train\"");
    refuse_set("train.steps=x", "whole number");
}

/* Prints, loads what was printed, prints again: the same text. */
static void expect_round_trip(struct mt_config *c)
{
    MT_STR_FREED struct mt_str once = {0}, again = {0}, diff = {0}, grown = {0};
    MT_CLOSED_BY(mt_config_destroy) struct mt_config *back = NULL;
    struct mt_err err = {0};
    char path[256];
    mt_config_print(c, false, &once);
    snprintf(path, sizeof(path), "%s/effective.ini", dir);
    assert_int_equal(mt_write_file(path, once.p, once.len, NULL), 0);
    if (mt_config_load(&back, path, NULL, 0, &err))
        fail_msg("%s\n%s", err.msg, once.p);
    mt_config_print(back, false, &again);
    assert_string_equal(once.p, again.p);
    MUST(mt_config_diff, c, once.p, &diff, &grown);
    if (diff.len || grown.len)
        fail_msg("differs from itself: %s%s", diff.p ? diff.p : "", grown.p ? grown.p : "");
}

TEST(the_effective_configuration_loads_back)
{
    MT_CLOSED_BY(mt_config_destroy) struct mt_config *c = load(WHOLE);
    expect_round_trip(c);
    mt_config_destroy(&c);
    c = load("[model]\npath = /m x ; y\nfreeze = a*, b*\n[data]\ntrain = /d, \"/e\"\neval = 2.5%\n"
             "[train]\nepochs = 0.1\ntokens_per_step = 64Ki\nwarmup = 33.3%\nlearning_rate = 1.00000000000000022e-5\n"
             "[optimizer]\neps = 5e-324\n[memory]\ndevice_budget = 33.3%\nhost_budget = 123456789B\n"
             "[checkpoint]\nevery = 90s\ntime_limit = 11h30m\n[log]\nprogress = off\n");
    expect_round_trip(c);
}

TEST(odd_texts_load_back_or_are_refused)
{
    static const char *const good[] = {"a;b", "a ;b", "a\t;b", ";a", "#a", " a", "a ", "a  b", "a\"b", "[x]", "a = b",
                                       "\xc3\xa9", "$x", "%d", ""};
    static const char *const bad[] = {"a\nb", "a\rb", "${x}", " \"a", "\"", "\"a\" ;"};
    char set[128], list[128];
    for (size_t i = 0; i < MT_ARRAY_LEN(good); i++) {
        const char *sets[] = {"model.path=/m", "data.train=/d", "train.steps=1", "train.batch_size=1", set, list};
        snprintf(set, sizeof(set), "model.path=%s", i == 14 ? "/" : good[i]);
        snprintf(list, sizeof(list), "model.freeze=x, %s", good[i]);
        MT_CLOSED_BY(mt_config_destroy) struct mt_config *c = load_sets(sets, 6);
        assert_string_equal(c->model.path, i == 14 ? "/" : good[i]);
        /* a file makes relative paths its own: compare those that are not */
        MT_STR_FREED struct mt_str text = {0};
        MT_CLOSED_BY(mt_config_destroy) struct mt_config *back = NULL, *copy = NULL;
        struct mt_err err = {0};
        MUST(mt_config_copy, &copy, c, "");
        assert_string_equal(copy->model.freeze.items[copy->model.freeze.n - 1], c->model.freeze.items[c->model.freeze.n - 1]);
        mt_config_print(c, true, &text);
        if (mt_config_load(&back, put("odd.ini", text.p), NULL, 0, &err))
            fail_msg("%s: %s", good[i], err.msg);
        const char *got = back->model.path, *base = good[i][0] == '/' ? got : strstr(got, good[i]);
        if (i != 14 && (!base || strcmp(base, good[i])))
            fail_msg("\"%s\" came back as \"%s\"", good[i], got);
        assert_int_equal(back->model.freeze.n, c->model.freeze.n);
        for (int k = 0; k < c->model.freeze.n; k++)
            assert_string_equal(back->model.freeze.items[k], c->model.freeze.items[k]);
    }
    for (size_t i = 0; i < MT_ARRAY_LEN(bad); i++) {
        snprintf(set, sizeof(set), "model.path=%s", bad[i]);
        refuse_set(set, "must not contain");
    }
}

TEST(changes_on_resume_are_told_apart)
{
    MT_CLOSED_BY(mt_config_destroy) struct mt_config *c = load(WHOLE), *d = NULL;
    struct mt_str diff = {0}, grown = {0};
    MT_STR_FREED struct mt_str old = {0};
    struct mt_err err = {0};
    mt_config_print(c, false, &old);
    d = load("[model]\npath = m\n[data]\ntrain = d.jsonl\n[train]\nsteps = 5\nbatch_size = 4\nseed = 7\n"
             "[memory]\nslots = 4\nlogits_chunk = 128\nlatent_cache = on\n[device]\ncpu_threads = 1\n[log]\nevery = 3\n"
             "[eval]\nevery = 9\n[checkpoint]\nkeep = 5\n");
    MUST(mt_config_diff, d, old.p, &diff, &grown);
    assert_string_equal(diff.p, "  train.seed: 42 -> 7\n  memory.logits_chunk: auto -> 128\n");
    assert_string_equal(grown.p, "  train.steps: 3 -> 5\n");
    mt_config_destroy(&d);
    mt_str_finish(&diff);
    mt_str_finish(&grown);
    d = load("[model]\npath = m\n[data]\ntrain = d.jsonl\n[train]\nsteps = 2\nbatch_size = 4\n");
    MUST(mt_config_diff, d, old.p, &diff, &grown);
    assert_string_equal(diff.p, "  train.steps: 3 -> 2\n"); /* shrinking is a difference */
    assert_null(grown.p);
    assert_int_equal(mt_config_diff(d, "[nonsense\na = b\n", &diff, &grown, &err), -EINVAL);
    mt_str_finish(&diff);
    mt_config_destroy(&d);
    d = load("[model]\npath = m\ncompute = bf16\n[data]\ntrain = d.jsonl\n[train]\nsteps = 3\nbatch_size = 4\n");
    MUST(mt_config_diff, d, old.p, &diff, &grown); /* what auto is */
    assert_null(diff.p);
    mt_config_destroy(&d);
    d = load("[model]\npath = m\ncompute = fp8\n[data]\ntrain = d.jsonl\n[train]\nsteps = 3\nbatch_size = 4\n");
    MUST(mt_config_diff, d, old.p, &diff, &grown);
    assert_string_equal(diff.p, "  model.compute: bf16 -> fp8\n");
    mt_str_finish(&diff);
    static const char *const evals[][2] = {{"e.jsonl", ""}, {"5", "  data.eval:  -> 5\n"}, {"2%", "  data.eval:  -> 2%\n"}};
    for (size_t i = 0; i < MT_ARRAY_LEN(evals); i++) { /* a file changes nothing that is trained, a part of the data does */
        mt_config_destroy(&d);
        MUST(mt_config_copy, &d, c, "");
        MUST(mt_config_override, d, "data.eval", evals[i][0], "run.ini:1");
        MUST(mt_config_diff, d, old.p, &diff, &grown);
        assert_string_equal(diff.p ? diff.p : "", evals[i][1]);
        mt_str_finish(&diff);
    }
}

/* What another version wrote: keys that are gone or new, values that it alone takes. */
TEST(an_earlier_configuration_is_read_as_far_as_it_matters)
{
    MT_CLOSED_BY(mt_config_destroy) struct mt_config *c = load(WHOLE "[optimizer]\nbeta1 = 0.8\n");
    struct mt_str diff = {0}, grown = {0};
    struct mt_err err = {0};
    static const char ini[] = "[train]\nsteps = 3\nbatch_size = 4\nmicro_batch = 2\nwarp = 9\n[gone]\na = b\n"
                              "[memory]\nlogits_chunk = 128\nslots = 7\nunit = quarter\n[device]\nnuma = node0\n";
    MUST(mt_config_keep, c, ini, "checkpoint");
    assert_int_equal(c->numerics.micro_batch, 2);
    assert_int_equal(c->numerics.logits_chunk, 128);
    assert_int_equal(c->placement.slots, MT_AUTO); /* placement is this machine's */
    assert_int_equal(c->placement.unit, MT_CUT_AUTO);
    assert_int_equal(c->numerics.grad_dtype, MT_DTYPE_AUTO); /* not told: as it was by default */
    MUST(mt_config_diff, c, ini, &diff, &grown);
    assert_non_null(strstr(diff.p, "\n  optimizer.beta1: 0.9 -> 0.8\n"));
    for (size_t i = 0, lines = 0; diff.p[i]; i++) /* that, and model.path and data.train, which the text does not have */
        assert_true((lines += diff.p[i] == '\n') <= 3);
    assert_null(grown.p);
    mt_str_finish(&diff);
    assert_int_equal(mt_config_keep(c, "[optimizer]\ntype = lamb\n", "checkpoint", &err), -EINVAL);
    assert_non_null(strstr(err.msg, "adamw"));
}

/* All that a version before this one wrote, of a run of its own: nothing is left out, nothing differs. */
TEST(a_stored_configuration_of_an_earlier_version_makes_no_difference)
{
    struct mt_str diff = {0}, grown = {0};
    MT_CLOSED_BY(mt_config_destroy) struct mt_config *c = NULL;
    MT_FREED char *text = NULL;
    size_t len;
    assert_int_equal(mt_read_file(EARLIER, &text, &len, NULL), 0);
    MUST(mt_config_load, &c, EARLIER, NULL, 0);
    c->numerics.micro_batch = c->numerics.logits_chunk = MT_AUTO;
    c->numerics.grad_dtype = MT_DTYPE_AUTO;
    c->placement.slots = 9;
    MUST(mt_config_keep, c, text, "checkpoint");
    MUST(mt_config_diff, c, text, &diff, &grown);
    assert_null(diff.p);
    assert_null(grown.p);
    assert_int_equal(c->numerics.micro_batch, 2);
    assert_int_equal(c->numerics.logits_chunk, 4096);
    assert_int_equal(c->numerics.grad_dtype, MT_BF16);
}

TEST(what_was_decided_is_written_back_by_role)
{
    MT_CLOSED_BY(mt_config_destroy) struct mt_config *c = load(WHOLE), *d = NULL;
    struct mt_numerics n = c->numerics;
    struct mt_placement p = c->placement;
    MT_STR_FREED struct mt_str text = {0};
    n.micro_batch = 3;
    n.grad_dtype = MT_F32;
    p.slots = 5;
    p.keep_layers = 0;
    p.unit = MT_CUT_HALVES;
    p.activations = MT_ACT_RECOMPUTE;
    p.threads = 7;
    p.device_budget = (struct mt_size){.bytes = 123};
    assert_int_equal(mt_config_adopt(c, &n, &p, "chosen", NULL), 0);
    mt_config_print(c, true, &text);
    static const char *const want[] = {"micro_batch = 3 ; chosen", "grad_dtype = f32 ; chosen", "slots = 5 ; chosen",
        "keep_layers = 0 ; chosen", "unit = half ; chosen", "activations = recompute ; chosen",
        "cpu_threads = auto ; default", "device_budget = auto ; default", "logits_chunk = auto ; default",
        "seed = 42 ; default"};
    for (size_t i = 0; i < MT_ARRAY_LEN(want); i++)
        if (!strstr(text.p, want[i]))
            fail_msg("%s is not in\n%s", want[i], text.p);
    if (mt_config_load(&d, put("adopted.ini", text.p), NULL, 0, NULL))
        fail_msg("%s", text.p);
}

TEST_GROUP(set_up, tear_down)

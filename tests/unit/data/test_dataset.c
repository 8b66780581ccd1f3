/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <dirent.h>
#include <fcntl.h>
#include <unistd.h>

#include "base/fs.h"
#include "base/mem.h"
#include "data/dataset.h"
#include "data/notes.h"
#include "data/shard.h"
#include "data/sources.h"
#include "test.h"

struct folder {
    char dir[64], cache[96];
};

static int open_folder(void **state)
{
    struct folder *f = mt_calloc(1, sizeof(*f));
    snprintf(f->dir, sizeof(f->dir), "/tmp/mt-set-XXXXXX");
    *state = f;
    if (!mkdtemp(f->dir))
        return -1;
    snprintf(f->cache, sizeof(f->cache), "%s/cache", f->dir);
    return 0;
}

static int close_folder(void **state)
{
    MT_FREED struct folder *f = *state;
    mt_remove_tree(f->dir, NULL);
    return 0;
}

/* `n` samples of `len` tokens that all are `token`; the last third of the tokens is trained. */
static char *write_ids(const struct folder *f, const char *name, int n, int len, int token)
{
    char *path = mt_path_join(f->dir, name);
    FILE *out = fopen(path, "w");
    assert_non_null(out);
    for (int i = 0; i < n; i++) {
        fprintf(out, "{\"input_ids\": [%d", token);
        for (int k = 1; k < len; k++)
            fprintf(out, ", %d", token);
        fprintf(out, "], \"labels\": [%d", len < 3 ? token : -100);
        for (int k = 1; k < len; k++)
            fprintf(out, ", %d", k * 3 >= 2 * len ? token : -100);
        fprintf(out, "]}\n");
    }
    fclose(out);
    return path;
}

static int open_set(mt_dataset **d, const struct folder *f, struct mt_cfg_list *files,
                    enum mt_cfg_overlong overlong, size_t seq_len, struct mt_err *err)
{
    struct mt_dataset_params p = {files, MT_FORMAT_AUTO, "byte", overlong, seq_len, 1000, f->cache};
    return mt_dataset_open(d, &p, err);
}

TEST_WITH(samples_keep_the_order_of_their_files, open_folder, close_folder)
{
    const struct folder *f = *state;
    char *items[] = {write_ids(f, "b.jsonl", 3, 5, 2), write_ids(f, "a.jsonl", 2, 4, 1)};
    struct mt_cfg_list files = {items, 2};
    mt_dataset *d = NULL;
    char place[4200];
    assert_int_equal(open_set(&d, f, &files, MT_OVERLONG_ERROR, 16, NULL), 0);
    assert_int_equal(mt_dataset_n_sources(d), 2);
    assert_int_equal(mt_dataset_source(d, 1)->first, 3);
    for (uint64_t i = 0; i < 5; i++) {
        const uint32_t *ids;
        uint8_t trained[16];
        size_t n = mt_dataset_sample(d, i, &ids, trained);
        assert_int_equal(n, i < 3 ? 5 : 4);
        assert_int_equal(ids[0], i < 3 ? 2 : 1);
        assert_int_equal(trained[0], 0);
        assert_int_equal(trained[n - 1], 1);
    }
    mt_dataset_place(d, 4, place, sizeof(place));
    assert_non_null(strstr(place, "a.jsonl:2"));
    mt_dataset_destroy(&d);
    free(items[0]);
    free(items[1]);
}

TEST_WITH(overlong_samples_are_cut_when_read_and_never_stored_cut, open_folder, close_folder)
{
    const struct folder *f = *state;
    char *items[] = {write_ids(f, "long.jsonl", 3, 30, 7)};
    struct mt_cfg_list files = {items, 1};
    mt_dataset *d = NULL;
    struct mt_err err = {0};
    assert_int_equal(open_set(&d, f, &files, MT_OVERLONG_ERROR, 8, &err), -E2BIG);
    assert_non_null(strstr(err.msg, "3 samples are longer than data.seq_len = 8, the longest has 30 tokens"));
    assert_non_null(strstr(err.msg, "long.jsonl:1"));
    assert_int_equal(open_set(&d, f, &files, MT_OVERLONG_DROP, 8, &err), -E2BIG);
    /* the first eight tokens have none that is trained */
    assert_int_equal(open_set(&d, f, &files, MT_OVERLONG_TRUNCATE, 8, &err), -E2BIG);
    assert_int_equal(open_set(&d, f, &files, MT_OVERLONG_TRUNCATE, 24, &err), 0);
    const struct mt_dataset_stats *s = mt_dataset_stats(d);
    assert_int_equal(s->n_samples, 3);
    assert_int_equal(s->n_tokens, 72);
    assert_int_equal(s->n_trained, 12);
    assert_int_equal(s->n_truncated, 3);
    assert_int_equal(s->longest, 30);
    mt_dataset_destroy(&d);
    assert_int_equal(open_set(&d, f, &files, MT_OVERLONG_SPLIT, 8, &err), 0);
    s = mt_dataset_stats(d);
    assert_true(s->from_cache);
    assert_int_equal(s->n_samples, 6); /* 16-24 and 24-30 of each; what nothing is trained in is left out */
    assert_int_equal(s->n_trained, 3 * 9);
    const uint32_t *ids;
    char place[4200];
    assert_int_equal(mt_dataset_sample(d, 1, &ids, NULL), 6);
    mt_dataset_place(d, 3, place, sizeof(place));
    assert_non_null(strstr(place, "long.jsonl:2"));
    mt_dataset_destroy(&d);
    free(items[0]);
}

/* How often an epoch visits the samples whose tokens are `token`. */
static int visits(mt_sampler *s, uint64_t epoch, uint32_t token, uint64_t *seen)
{
    struct mt_step_data sd;
    uint64_t per = mt_sampler_stats(s)->steps_per_epoch;
    int n = 0;
    assert_int_equal(mt_step_data_init(&sd, s, NULL), 0);
    for (uint64_t i = 0; i < per; i++) {
        assert_int_equal(mt_sampler_fill(s, epoch * per + i, &sd, NULL), 0);
        for (size_t m = 0; m < sd.n; m++)
            for (size_t d = 0; d < sd.micro[m].n_docs; d++)
                if (sd.micro[m].ids[sd.micro[m].cu_seqlens[d]] == (int32_t)token) {
                    seen[sd.micro[m].sample[d]]++;
                    n++;
                }
    }
    mt_step_data_finish(&sd);
    return n;
}

TEST_WITH(weights_say_how_often_an_epoch_visits_a_file, open_folder, close_folder)
{
    const struct folder *f = *state;
    char *a = write_ids(f, "w1.jsonl", 40, 6, 1), *b = write_ids(f, "w2.jsonl", 40, 6, 2);
    MT_FREED char *c = write_ids(f, "w3.jsonl", 40, 6, 3);
    char *items[] = {a, NULL, NULL};
    assert_true(asprintf(&items[1], "%s:2.5", b) > 0 && asprintf(&items[2], "%s:0.25", c) > 0);
    struct mt_cfg_list files = {items, 3};
    mt_dataset *d = NULL;
    mt_sampler *s = NULL;
    assert_int_equal(open_set(&d, f, &files, MT_OVERLONG_ERROR, 6, NULL), 0);
    for (int shuffle = 0; shuffle < 2; shuffle++) {
        struct mt_sampler_params p = {d, NULL, 6, 7, 3, true, shuffle, 9, true};
        uint64_t seen[120] = {0};
        assert_int_equal(mt_sampler_create(&s, &p, NULL), 0);
        assert_int_equal(mt_sampler_stats(s)->rows_per_epoch, 40 + 100 + 10);
        for (uint64_t epoch = 0; epoch < 4; epoch++) {
            assert_int_equal(visits(s, epoch, 1, seen), 40);
            assert_int_equal(visits(s, epoch, 2, seen), 100);
            assert_int_equal(visits(s, epoch, 3, seen), 10);
        }
        for (int i = 0; i < 120; i++) /* over four epochs each as often as any other of its file */
            assert_int_equal(seen[i], i < 40 ? 4 : i < 80 ? 10 : 1);
        mt_sampler_destroy(&s);
        p.weighted = false;
        assert_int_equal(mt_sampler_create(&s, &p, NULL), 0);
        assert_int_equal(mt_sampler_stats(s)->rows_per_epoch, 120);
        mt_sampler_destroy(&s);
    }
    mt_dataset_destroy(&d);
    for (int i = 0; i < 3; i++)
        free(items[i]);
    free(b);
}

TEST_WITH(a_shard_that_lies_is_refused, open_folder, close_folder)
{
    const struct folder *f = *state;
    char *items[] = {write_ids(f, "lie.jsonl", 4, 5, 3)}, cmd[300], *text, *path;
    struct mt_cfg_list files = {items, 1};
    mt_dataset *d = NULL;
    size_t len;
    assert_int_equal(open_set(&d, f, &files, MT_OVERLONG_ERROR, 16, NULL), 0);
    mt_dataset_destroy(&d);
    snprintf(cmd, sizeof(cmd), "mv %s/*.tokens %s/x", f->cache, f->dir);
    assert_int_equal(system(cmd), 0);
    path = mt_path_join(f->dir, "x");
    assert_int_equal(mt_read_file(path, &text, &len, NULL), 0);
    struct mt_shard s;
    assert_int_equal(mt_shard_open(&s, path, 0, NULL), 0);
    size_t offsets = (size_t)((const char *)s.places - (const char *)s.map) - (s.header->n_samples + 1) * 8;
    assert_int_equal(mt_shard_count_trained(&s, 0, 20), 4);
    assert_int_equal(mt_shard_count_trained(&s, 3, 13), 3);
    mt_shard_close(&s);
    /* magic, version, token width, tokens, samples, offsets that go back, names without an end */
    static const size_t at[] = {0, 8, 12, 24, 32, 0, 96 + 23};
    for (size_t i = 0; i < MT_ARRAY_LEN(at); i++) {
        size_t where = at[i] || !i ? at[i] : offsets + 8 + 7;
        char *bad = malloc(len);
        memcpy(bad, text, len);
        if (i == 6)
            memset(bad + 96, 'x', 24);
        bad[where] ^= 0x55;
        assert_int_equal(mt_write_file(path, bad, len, NULL), 0);
        assert_int_equal(mt_shard_open(&s, path, 0, NULL), -EINVAL);
        free(bad);
    }
    assert_int_equal(mt_write_file(path, text, len - 8, NULL), 0);
    assert_int_equal(mt_shard_open(&s, path, 0, NULL), -EINVAL);
    free(text);
    free(path);
    free(items[0]);
}

TEST_WITH(files_that_need_the_helper_are_told_from_those_that_do_not, open_folder, close_folder)
{
    static const struct {
        const char *name, *text;
        enum mt_cfg_format format;
        bool byte, model; /* needs it with the byte tokenizer, with the model's */
    } cases[] = {
        {"a.jsonl", "{\"input_ids\": [1, 2]}\n", MT_FORMAT_AUTO, false, false},
        {"b.jsonl", "\n {\"text\": \"a\"}\n", MT_FORMAT_AUTO, false, true},
        {"c.json", "[\n{\"messages\": []}]", MT_FORMAT_AUTO, true, true},
        {"d.jsonl", "{\"prompt\": \"a\", \"completion\": \"b\"}", MT_FORMAT_AUTO, false, true},
        {"e.jsonl", "{\"prompt\": [], \"completion\": []}", MT_FORMAT_AUTO, true, true},
        {"f.jsonl", "{\"conversations\": []}", MT_FORMAT_SHAREGPT, true, true},
        {"g.jsonl", "{broken", MT_FORMAT_AUTO, false, false},
        {"h.jsonl", "", MT_FORMAT_AUTO, false, false},
        {"i.txt", "text", MT_FORMAT_AUTO, false, true},
        {"j.jsonl.gz", "x", MT_FORMAT_INPUT_IDS, true, true},
        {"k.parquet", "x", MT_FORMAT_AUTO, true, true},
        {"l.jsonl", "{\"stuff\": 1}", MT_FORMAT_AUTO, false, false},
        {"m.jsonl", "[1, 2]", MT_FORMAT_AUTO, false, false},
    };
    const struct folder *f = *state;
    for (size_t i = 0; i < MT_ARRAY_LEN(cases); i++) {
        struct mt_source_file s = {mt_path_join(f->dir, cases[i].name), 1, NULL};
        assert_int_equal(mt_write_file(s.path, cases[i].text, strlen(cases[i].text), NULL), 0);
        if (mt_source_needs_helper(&s, cases[i].format, "byte") != cases[i].byte ||
            mt_source_needs_helper(&s, cases[i].format, "model") != cases[i].model)
            fail_msg("%s", cases[i].name);
        free(s.path);
    }
}

/* The only shard in the cache. */
static char *only_shard(const struct folder *f)
{
    DIR *d = opendir(f->cache);
    char *path = NULL;
    for (struct dirent *e; (e = readdir(d));)
        if (strstr(e->d_name, ".tokens")) {
            assert_null(path);
            path = mt_path_join(f->cache, e->d_name);
        }
    closedir(d);
    assert_non_null(path);
    return path;
}

static void poke(const char *path, off_t at, const void *p, size_t n)
{
    int fd = open(path, O_WRONLY);
    assert_int_equal(pwrite(fd, p, n, at), n);
    close(fd);
}

TEST_WITH(a_damaged_shard_is_made_again, open_folder, close_folder)
{
    const struct folder *f = *state;
    char *items[] = {write_ids(f, "a.jsonl", 3, 5, 2)};
    struct mt_cfg_list files = {items, 1};
    mt_dataset *d = NULL;
    const uint32_t *ids;
    assert_int_equal(open_set(&d, f, &files, MT_OVERLONG_ERROR, 16, NULL), 0);
    uint64_t hash = mt_dataset_hash(d);
    mt_dataset_destroy(&d);
    char *shard = only_shard(f);
    for (int how = 0; how < 5; how++) {
        const uint32_t other = 7;
        const uint64_t none = 0;
        if (how == 0)
            poke(shard, 4096 + 4, &other, 4); /* a token */
        else if (how == 1)
            poke(shard, 4096 + 64, &other, 1); /* the mask */
        else if (how == 2)
            poke(shard, 4096 + 64 + 8 + 32, &other, 4); /* a place */
        else if (how == 3)
            assert_int_equal(truncate(shard, 4096 + 40), 0);
        else
            poke(shard, offsetof(struct mt_shard_header, content_sum), &none, 8); /* not sealed */
        for (int again = 0; again < 2; again++) {
            assert_int_equal(open_set(&d, f, &files, MT_OVERLONG_ERROR, 16, NULL), 0);
            assert_int_equal(mt_dataset_stats(d)->from_cache, again);
            assert_true(mt_dataset_hash(d) == hash);
            mt_dataset_sample(d, 0, &ids, NULL);
            assert_int_equal(ids[1], 2);
            mt_dataset_destroy(&d);
        }
    }
    free(shard);
    free(items[0]);
}

/* By their tokens, masks and cuts. */
TEST_WITH(data_are_told_by_their_tokens, open_folder, close_folder)
{
    const struct folder *f = *state;
    char *items[] = {write_ids(f, "a.jsonl", 3, 5, 2)}, *other[] = {write_ids(f, "b.jsonl", 3, 5, 2)};
    struct mt_cfg_list files = {items, 1}, same = {other, 1};
    mt_dataset *d = NULL;
    FILE *out = fopen(other[0], "a"); /* other bytes of the same samples */
    fprintf(out, "\n\n");
    fclose(out);
    assert_int_equal(open_set(&d, f, &files, MT_OVERLONG_ERROR, 16, NULL), 0);
    uint64_t hash = mt_dataset_hash(d);
    mt_dataset_destroy(&d);
    assert_int_equal(open_set(&d, f, &same, MT_OVERLONG_ERROR, 16, NULL), 0);
    assert_false(mt_dataset_stats(d)->from_cache);
    assert_true(mt_dataset_hash(d) == hash);
    mt_dataset_destroy(&d);
    assert_int_equal(open_set(&d, f, &files, MT_OVERLONG_ERROR, 32, NULL), 0);
    assert_false(mt_dataset_hash(d) == hash);
    mt_dataset_destroy(&d);
    free(items[0]);
    free(other[0]);
}

/* samples: of each file; 0: the file is meant. */
TEST(a_note_says_how_often_it_is_true)
{
    static const struct {
        int files, samples;
        const char *more;
    } cases[] = {{1, 0, ""}, {2, 0, ", and so of 1 more file"}, {3, 0, ", and so of 2 more files"},
                 {1, 1, ""}, {1, 2, ", and so in 1 more sample"}, {1, 3, ", and so in 2 more samples"},
                 {2, 1, ", and so in 1 more sample of 2 files"}, {2, 2, ", and so in 3 more samples of 2 files"},
                 {3, 2, ", and so in 5 more samples of 3 files"}};
    for (size_t i = 0; i < MT_ARRAY_LEN(cases); i++) {
        MT_CLOSED_BY(mt_notes_finish) struct mt_notes l = {0};
        char packed[128], text[1024], want[256];
        snprintf(packed, sizeof(packed), "y\tother\t1\t:1\talone\t\nw\tlost\t%d\t:7\tis lost\tmend it\n", cases[i].samples);
        for (int k = 0; k < cases[i].files; k++)
            MUST(mt_notes_add, &l, packed, k ? "b.jsonl" : "a.jsonl");
        snprintf(want, sizeof(want), "a.jsonl:7: is lost%s: mend it", cases[i].more);
        assert_string_equal(mt_note_print(mt_notes_find(&l, "lost"), text, sizeof(text)), want);
        assert_non_null(strstr(mt_note_print(&l.items[0], text, sizeof(text)), "a.jsonl:1: alone"));
        assert_true(l.n == 2 && l.items[1].level == 'w' && !mt_notes_find(&l, "none"));
    }
}

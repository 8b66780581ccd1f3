/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/fs.h"
#include "base/mem.h"
#include "base/philox.h"
#include "data/dataset.h"
#include "data/loader.h"
#include "test.h"

struct fixture {
    char dir[64], file[96], cache[96];
    mt_dataset *d;
};

/* Samples of log-normal lengths; the first token of sample i tells i. */
static void make(struct fixture *f, size_t n, size_t seq_len, double median)
{
    snprintf(f->dir, sizeof(f->dir), "/tmp/mt-data-XXXXXX");
    assert_non_null(mkdtemp(f->dir));
    snprintf(f->file, sizeof(f->file), "%s/d.jsonl", f->dir);
    snprintf(f->cache, sizeof(f->cache), "%s/cache", f->dir);
    FILE *out = fopen(f->file, "w");
    for (size_t i = 0; i < n; i++) {
        float z;
        mt_philox_normal(&z, 1, i, 1, 1, 0.9f);
        size_t len = (size_t)(median * exp((double)z)) + 2;
        len = MT_MIN(len, seq_len);
        fprintf(out, "{\"input_ids\": [%zu", i);
        for (size_t k = 1; k < len; k++)
            fprintf(out, ",%zu", k % 50);
        fprintf(out, "]}\n");
    }
    fclose(out);
    char *item = f->file;
    struct mt_cfg_list list = {&item, 1};
    struct mt_dataset_params p = {&list, MT_FORMAT_AUTO, "model", MT_OVERLONG_ERROR, seq_len, 1 << 24,
                                  f->cache};
    MUST(mt_dataset_open, &f->d, &p);
}

static void finish(struct fixture *f)
{
    mt_dataset_destroy(&f->d);
    mt_remove_tree(f->dir, NULL);
}

static mt_sampler *sampler(const struct fixture *f, size_t seq_len, size_t rows, size_t micro, bool packing,
                           bool shuffle)
{
    mt_sampler *s = NULL;
    struct mt_sampler_params p = {f->d, NULL, seq_len, rows, micro, packing, shuffle, 42};
    assert_int_equal(mt_sampler_create(&s, &p, NULL), 0);
    return s;
}

TEST(packing_fills_rows)
{
    struct fixture f;
    make(&f, 20000, 1024, 120);
    mt_sampler *s = sampler(&f, 1024, 8, 2, true, true);
    if (!(mt_sampler_stats(s)->efficiency >= 0.98))
        fail_msg("packing efficiency %.4f", mt_sampler_stats(s)->efficiency);
    mt_sampler_destroy(&s);
    finish(&f);
}

TEST(every_sample_comes_once_an_epoch)
{
    struct fixture f;
    enum { N = 500, LEN = 128 };
    make(&f, N, LEN, 20);
    for (int v = 0; v < 4; v++) {
        mt_sampler *s = sampler(&f, LEN, 6, 4, v & 1, v & 2);
        struct mt_step_data sd;
        uint64_t per = mt_sampler_stats(s)->steps_per_epoch;
        assert_int_equal(mt_step_data_init(&sd, s, NULL), 0);
        for (uint64_t epoch = 0; epoch < 2; epoch++) {
            int seen[N] = {0};
            for (uint64_t i = 0; i < per; i++) {
                size_t rows = 0;
                assert_int_equal(mt_sampler_fill(s, epoch * per + i, &sd, NULL), 0);
                assert_true(i + 1 == per || sd.n == 2);
                for (size_t m = 0; m < sd.n; m++) {
                    const struct mt_batch *b = &sd.micro[m];
                    assert_true(b->n_tokens <= b->cap_tokens);
                    for (size_t d = 0; d < b->n_docs; d++, rows++)
                        seen[b->ids[b->cu_seqlens[d]]]++;
                }
                (void)rows;
            }
            for (int k = 0; k < N; k++)
                assert_int_equal(seen[k], 1);
        }
        mt_step_data_finish(&sd);
        mt_sampler_destroy(&s);
    }
    finish(&f);
}

TEST(a_step_depends_on_its_number_alone)
{
    struct fixture f;
    make(&f, 300, 64, 15);
    mt_sampler *a = sampler(&f, 64, 5, 2, true, true), *b = sampler(&f, 64, 5, 2, true, true);
    struct mt_step_data x, y;
    assert_int_equal(mt_step_data_init(&x, a, NULL), 0);
    assert_int_equal(mt_step_data_init(&y, b, NULL), 0);
    for (uint64_t i = 0; i < 40; i++)
        assert_int_equal(mt_sampler_fill(a, i, &x, NULL), 0);
    assert_int_equal(mt_sampler_fill(b, 39, &y, NULL), 0);
    assert_int_equal(x.n_tokens, y.n_tokens);
    for (size_t m = 0; m < x.n; m++)
        assert_memory_equal(x.micro[m].ids, y.micro[m].ids, x.micro[m].n_tokens * 4);
    mt_step_data_finish(&x);
    mt_step_data_finish(&y);
    mt_sampler_destroy(&a);
    mt_sampler_destroy(&b);
    finish(&f);
}

TEST(the_loader_gives_what_the_sampler_does)
{
    /* in order, a step again, back, far ahead, to the end */
    static const uint64_t steps[] = {0, 1, 2, 2, 3, 1, 30, 31, 38, 39};
    struct fixture f;
    struct mt_step_data want;
    mt_loader *l = NULL;
    make(&f, 300, 128, 20);
    mt_sampler *s = sampler(&f, 128, 6, 4, true, true), *other = sampler(&f, 128, 6, 4, true, true);
    assert_int_equal(mt_step_data_init(&want, s, NULL), 0);
    assert_int_equal(mt_loader_create(&l, other, 0, 40, NULL), 0);
    for (size_t i = 0; i < MT_ARRAY_LEN(steps); i++) {
        const struct mt_step_data *got;
        assert_int_equal(mt_sampler_fill(s, steps[i], &want, NULL), 0);
        assert_int_equal(mt_loader_get(l, steps[i], &got, NULL), 0);
        assert_int_equal(got->n, want.n);
        assert_int_equal(got->n_loss, want.n_loss);
        for (size_t m = 0; m < want.n; m++) {
            assert_int_equal(got->micro[m].n_tokens, want.micro[m].n_tokens);
            assert_memory_equal(got->micro[m].ids, want.micro[m].ids, want.micro[m].n_tokens * 4);
            assert_memory_equal(got->micro[m].order, want.micro[m].order, want.micro[m].n_tokens * 4);
        }
    }
    mt_loader_destroy(&l);
    assert_int_equal(mt_loader_create(&l, other, 5, 40, NULL), 0); /* destroyed while it works ahead */
    mt_loader_destroy(&l);
    mt_step_data_finish(&want);
    mt_sampler_destroy(&s);
    mt_sampler_destroy(&other);
    finish(&f);
}

TEST(targets_are_shifted_within_a_document)
{
    struct mt_batch b;
    static const uint32_t one[] = {5, 6, 7, 8}, two[] = {9, 5};
    static const uint8_t trained[] = {1, 0, 1, 1};
    assert_int_equal(mt_batch_init(&b, 8, 2, NULL), 0);
    assert_int_equal(mt_batch_add(&b, one, trained, 4, 0, NULL), 0);
    assert_int_equal(mt_batch_add(&b, two, NULL, 2, 1, NULL), 0);
    assert_int_equal(mt_batch_add(&b, two, NULL, 2, 2, NULL), -ENOSPC);
    mt_batch_seal(&b);
    static const int32_t rows[] = {1, 2, 4}, targets[] = {7, 8, 5}, positions[] = {0, 1, 2, 3, 0, 1};
    assert_int_equal(b.n_loss, 3);
    assert_memory_equal(b.loss_rows, rows, sizeof(rows));
    assert_memory_equal(b.targets, targets, sizeof(targets));
    assert_memory_equal(b.positions, positions, sizeof(positions));
    static const int32_t ids[] = {5, 6, 7, 8, 9}, starts[] = {0, 2, 3, 4, 5, 6}, order[] = {0, 5, 1, 2, 3, 4};
    assert_int_equal(b.n_runs, 5);
    assert_memory_equal(b.run_ids, ids, sizeof(ids));
    assert_memory_equal(b.run_starts, starts, sizeof(starts));
    assert_memory_equal(b.order, order, sizeof(order));
    mt_batch_finish(&b);
}

TEST(the_held_out_share_is_stable)
{
    struct fixture f;
    struct mt_split train, held;
    make(&f, 2000, 64, 15);
    assert_int_equal(mt_dataset_split(f.d, "10%", &train, &held, NULL), 0);
    assert_int_equal(train.n + held.n, 2000);
    assert_true(held.n > 140 && held.n < 260);
    mt_split_finish(&train);
    mt_split_finish(&held);
    assert_int_equal(mt_dataset_split(f.d, "37", &train, &held, NULL), 0);
    assert_int_equal(held.n, 37);
    mt_split_finish(&train);
    mt_split_finish(&held);
    finish(&f);
}

TEST(a_cached_shard_is_used_and_a_damaged_one_made_anew)
{
    struct fixture f;
    char cmd[300];
    make(&f, 100, 64, 15);
    char *item = f.file;
    struct mt_cfg_list list = {&item, 1};
    struct mt_dataset_params p = {&list, MT_FORMAT_AUTO, "model", MT_OVERLONG_ERROR, 64, 1 << 24, f.cache};
    mt_dataset *again = NULL;
    assert_false(mt_dataset_stats(f.d)->from_cache);
    assert_int_equal(mt_dataset_open(&again, &p, NULL), 0);
    assert_true(mt_dataset_stats(again)->from_cache);
    assert_int_equal(mt_dataset_stats(again)->n_tokens, mt_dataset_stats(f.d)->n_tokens);
    mt_dataset_destroy(&again);
    snprintf(cmd, sizeof(cmd), "truncate -s -8 %s/*.tokens", f.cache);
    assert_int_equal(system(cmd), 0);
    mt_dataset_destroy(&f.d);
    assert_int_equal(mt_dataset_open(&f.d, &p, NULL), 0);
    assert_false(mt_dataset_stats(f.d)->from_cache);
    finish(&f);
}

static void count_samples(mt_sampler *s, uint64_t first, uint64_t end, int *seen)
{
    struct mt_step_data sd;
    assert_int_equal(mt_step_data_init(&sd, s, NULL), 0);
    for (uint64_t i = first; i < end; i++) {
        assert_int_equal(mt_sampler_fill(s, i, &sd, NULL), 0);
        for (size_t m = 0; m < sd.n; m++)
            for (size_t d = 0; d < sd.micro[m].n_docs; d++)
                seen[sd.micro[m].ids[sd.micro[m].cu_seqlens[d]]]++;
    }
    mt_step_data_finish(&sd);
}

/* A run goes on with steps of another size, in the middle of a pass, of its last one, and at its end. */
TEST(steps_of_another_size_repeat_no_row_and_leave_none_out)
{
    enum { N = 100, LEN = 64 };
    static const uint64_t before[] = {5, 16, 17, 20, 33}; /* of 17 steps in a pass */
    struct fixture f;
    make(&f, N, LEN, 20);
    for (size_t i = 0; i < MT_ARRAY_LEN(before); i++) {
        mt_sampler *a = sampler(&f, LEN, 6, 2, false, true), *b = sampler(&f, LEN, 4, 2, false, true);
        int seen[N] = {0};
        mt_sampler_go_on(b, before[i], mt_sampler_rows_before(a, before[i]));
        uint64_t end = mt_sampler_step_at(b, 2 * N);
        assert_int_equal(mt_sampler_rows_before(b, end), 2 * N);
        count_samples(a, 0, before[i], seen);
        count_samples(b, before[i], end, seen);
        for (int k = 0; k < N; k++)
            assert_int_equal(seen[k], 2);
        mt_sampler_destroy(&a);
        mt_sampler_destroy(&b);
    }
    finish(&f);
}

/* A row cut in chunks: end to end they are the row, with its documents, positions and targets. */
TEST(chunks_of_a_row_are_the_row)
{
    enum { LEN = 128, CHUNKS = 16 };
    struct fixture f;
    make(&f, 300, LEN, 30);
    for (int packing = 0; packing < 2; packing++) {
        mt_sampler *whole = sampler(&f, LEN, 3, 1, packing, true), *cut = NULL;
        struct mt_sampler_params p = {f.d, NULL, LEN, 3, 1, packing, true, 42, .chunks = CHUNKS};
        assert_int_equal(mt_sampler_create(&cut, &p, NULL), 0);
        struct mt_step_data a, b;
        assert_int_equal(mt_step_data_init(&a, whole, NULL) | mt_step_data_init(&b, cut, NULL), 0);
        for (uint64_t step = 0; step < mt_sampler_stats(whole)->steps_per_epoch; step++) {
            assert_int_equal(mt_sampler_fill(whole, step, &a, NULL) | mt_sampler_fill(cut, step, &b, NULL), 0);
            assert_int_equal(b.n, CHUNKS * a.n);
            assert_int_equal(b.n_loss, a.n_loss);
            for (size_t i = 0; i < b.n; i++) {
                const struct mt_batch *row = &a.micro[i / CHUNKS], *c = &b.micro[i];
                size_t doc = 0, loss = 0;
                assert_in_range(c->n_tokens, 1, LEN / CHUNKS);
                if (row->n_tokens < CHUNKS) /* its last document is longer, by tokens without targets */
                    continue;
                assert_int_equal(c->row_before, row->n_tokens * (i % CHUNKS) / CHUNKS);
                assert_memory_equal(c->ids, row->ids + c->row_before, c->n_tokens * sizeof(*c->ids));
                assert_memory_equal(c->positions, row->positions + c->row_before, c->n_tokens * sizeof(*c->ids));
                while ((size_t)row->cu_seqlens[doc + 1] <= c->row_before)
                    doc++;
                assert_int_equal(c->doc_before, c->positions[0]);
                assert_int_equal(c->max_doc_len > c->doc_before, true);
                for (size_t d = 0; d < c->n_docs; d++)
                    assert_int_equal(c->sample[d], row->sample[doc + d]);
                assert_int_equal((size_t)row->cu_seqlens[doc + c->n_docs],
                                 c->row_before + c->n_tokens + c->doc_after);
                while (loss < row->n_loss && (size_t)row->loss_rows[loss] < c->row_before)
                    loss++;
                for (size_t k = 0; k < c->n_loss; k++, loss++) {
                    assert_int_equal(c->loss_rows[k] + (int32_t)c->row_before, row->loss_rows[loss]);
                    assert_int_equal(c->targets[k], row->targets[loss]);
                }
            }
        }
        mt_step_data_finish(&a);
        mt_step_data_finish(&b);
        mt_sampler_destroy(&whole);
        mt_sampler_destroy(&cut);
    }
    finish(&f);
}

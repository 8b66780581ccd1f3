/* SPDX-License-Identifier: Apache-2.0 */
/* What the fuzzers of the readers found, kept. */
#include <stdio.h>
#include <stdlib.h>

#include "base/fs.h"
#include "data/samples.h"
#include "test.h"

static char dir[64];

static int set_up(void **)
{
    snprintf(dir, sizeof(dir), "/tmp/mt-samples-XXXXXX");
    return mkdtemp(dir) ? 0 : -1;
}

static int tear_down(void **)
{
    return mt_remove_tree(dir, NULL);
}

/* Reads a file of this content and writes its shard; returns the samples there are. */
static uint64_t samples_of(const char *name, const char *text, size_t len)
{
    char path[128], out[128];
    struct mt_shard_writer w;
    struct mt_shard s;
    snprintf(path, sizeof(path), "%s/%s", dir, name);
    snprintf(out, sizeof(out), "%s/out.tokens", dir);
    assert_int_equal(mt_write_file(path, text, len, NULL), 0);
    assert_int_equal(mt_shard_writer_open(&w, out, NULL), 0);
    struct mt_sample_reader r = {.bytes = true, .vocab = 300, .out = &w};
    MUST(mt_samples_read_file, &r, path);
    MUST(mt_shard_writer_commit, &w, &r.header);
    mt_samples_finish(&r);
    mt_shard_writer_finish(&w);
    MUST(mt_shard_open, &s, out, 0);
    uint64_t n = s.header->n_samples;
    mt_shard_close(&s);
    return n;
}

TEST_WITH(a_text_of_one_byte_has_no_sample, set_up, tear_down)
{
    assert_int_equal(samples_of("a.txt", "", 0), 0);
    assert_int_equal(samples_of("a.txt", "x", 1), 0);
    assert_int_equal(samples_of("a.txt", "xy", 2), 1);
    assert_int_equal(samples_of("a.jsonl", "", 0), 0);
    assert_int_equal(samples_of("a.jsonl", "\n\n \r\n", 5), 0);
    assert_int_equal(samples_of("a.json", "[]", 2), 0);
    assert_int_equal(samples_of("a.jsonl", "{\"text\": \"\"}\n{\"text\": \"a\"}", 26), 2);
}

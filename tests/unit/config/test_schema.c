/* SPDX-License-Identifier: Apache-2.0 */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"
#include "config/config.h"
#include "config/schema.h"
#include "test.h"

TEST(keys_have_names_defaults_and_help)
{
    assert_true(mt_n_keys() > 50 && mt_n_keys() <= 256);
    for (size_t i = 0; i < mt_n_keys(); i++) {
        const struct mt_key *k = mt_key_at(i);
        assert_non_null(k->def);
        assert_true(strlen(k->help) > 8 && strchr(".*", k->help[strlen(k->help) - 1]));
        assert_ptr_equal(mt_key_find(k->section, k->name), k); /* no name twice */
        bool choice = k->type == MT_KEY_CHOICE || k->type == MT_KEY_WORD || k->type == MT_KEY_DTYPE;
        assert_true(choice == (k->choices != NULL) || k->type == MT_KEY_NAME_OR_FILE);
        bool own = k->offset == MT_KEY_NO_OFFSET;
        assert_true(own || k->offset < sizeof(struct mt_config));
        for (size_t j = 0; j < i; j++) /* sections hold together, no field twice */
            assert_true((own || mt_key_at(j)->offset != k->offset) &&
                        (strcmp(mt_key_at(j)->section, k->section) || !strcmp(mt_key_at(i - 1)->section, k->section)));
    }
}

TEST(each_default_prints_and_parses_back)
{
    MT_CLOSED_BY(mt_config_destroy) struct mt_config *c = NULL;
    assert_int_equal(mt_config_load(&c, NULL, NULL, 0, NULL), 0);
    for (size_t i = 0; i < mt_n_keys(); i++) {
        MT_STR_FREED struct mt_str once = {0}, again = {0};
        char why[256];
        mt_key_print(c, mt_key_at(i), &once);
        mt_str_append(&once, "", 0);
        if (mt_key_parse(c, mt_key_at(i), once.p, why, sizeof(why)))
            fail_msg("%s.%s = %s: %s", mt_key_at(i)->section, mt_key_at(i)->name, once.p, why);
        mt_key_print(c, mt_key_at(i), &again);
        mt_str_append(&again, "", 0);
        assert_string_equal(once.p, again.p);
    }
}

static bool has_bounds(const struct mt_key *k)
{
    bool number = k->type == MT_KEY_REAL || k->type == MT_KEY_COUNT || k->type == MT_KEY_WHOLE || k->type == MT_KEY_AMOUNT ||
                  k->type == MT_KEY_BYTES;
    return number && k->min <= k->max && (!k->unsupported || strcmp(k->unsupported, "*"));
}

static bool takes(struct mt_config *c, const struct mt_key *k, double v)
{
    char text[64], why[256];
    snprintf(text, sizeof(text), k->type == MT_KEY_REAL ? "%.17g" : k->type == MT_KEY_BYTES ? "%.0fB" : "%.0f", v);
    return !mt_key_parse(c, k, text, why, sizeof(why));
}

TEST(bounds_are_taken_and_what_is_beyond_is_refused)
{
    MT_CLOSED_BY(mt_config_destroy) struct mt_config *c = NULL;
    assert_int_equal(mt_config_load(&c, NULL, NULL, 0, NULL), 0);
    size_t n = 0;
    for (size_t i = 0; i < mt_n_keys(); i++) {
        const struct mt_key *k = mt_key_at(i);
        if (!has_bounds(k))
            continue;
        double least = k->type == MT_KEY_REAL ? 0 : 1; /* between two values */
        double low = MT_MIN(k->min - least, nextafter(k->min, -INFINITY));
        double high = MT_MAX(k->max + least, nextafter(k->max, INFINITY));
        if (!takes(c, k, k->min) || !takes(c, k, k->max) || takes(c, k, low) || takes(c, k, high))
            fail_msg("%s.%s is between %.17g and %.17g", k->section, k->name, k->min, k->max);
        n++;
    }
    assert_true(n > 50);
}

/* Whether the help, or the default, says that a number may be 0. */
static bool says_what_0_is(const struct mt_key *k)
{
    bool found = !*k->def || !strcmp(k->def, "0") || k->type == MT_KEY_AMOUNT;
    for (const char *at = k->help; (at = strchr(at, '0')); at++)
        found |= (at == k->help || strchr(" (", at[-1])) && strchr(" :,.;)", at[1]);
    return found;
}

TEST(the_least_number_is_1_or_0_where_that_is_explained)
{
    static const struct {
        const char *name;
        double least;
    } others[] = {{"seq_len", 2}, {"seed", 0}, {"by_tensor", 0}, {"update_pending", 0}, {"slots", 2}, {"keep_layers", 0},
                  {"offload_layers", 0}, {"logits_chunk", 64}, {"logits_piece", 64}, {"shard_size", 10000}};
    for (size_t i = 0; i < mt_n_keys(); i++) {
        const struct mt_key *k = mt_key_at(i);
        double least = says_what_0_is(k) ? 0 : 1;
        for (size_t j = 0; j < MT_ARRAY_LEN(others); j++)
            least = strcmp(others[j].name, k->name) ? least : others[j].least;
        if (has_bounds(k) && (k->type == MT_KEY_REAL ? k->min >= 1 : k->min != least))
            fail_msg("%s.%s: its least is %g", k->section, k->name, k->min);
    }
}

TEST(each_choice_parses_or_is_said_to_be_missing)
{
    MT_CLOSED_BY(mt_config_destroy) struct mt_config *c = NULL;
    assert_int_equal(mt_config_load(&c, NULL, NULL, 0, NULL), 0);
    for (size_t i = 0; i < mt_n_keys(); i++) {
        const char *at = mt_key_at(i)->choices;
        while (at && *at) {
            char word[64], why[256] = "";
            struct mt_str text = {0};
            size_t n = strcspn(at, "|");
            snprintf(word, sizeof(word), "%.*s", (int)n, at);
            if (mt_key_parse(c, mt_key_at(i), word, why, sizeof(why))) {
                assert_non_null(strstr(why, "not supported yet"));
            } else {
                mt_key_print(c, mt_key_at(i), &text);
                assert_string_equal(text.p, word);
            }
            mt_str_finish(&text);
            at += n + (at[n] == '|');
        }
    }
}

TEST(a_misspelt_key_is_found_again)
{
    for (size_t i = 0; i < mt_n_keys(); i++) {
        const struct mt_key *k = mt_key_at(i);
        char wrong[64];
        size_t n = strlen(k->name);
        if (n < 5)
            continue;
        snprintf(wrong, sizeof(wrong), "%.*s%s", (int)n / 2, k->name, k->name + n / 2 + 1);
        if (mt_key_find(k->section, wrong))
            continue;
        const char *guess = mt_key_suggest(k->section, wrong);
        assert_non_null(guess);
        assert_true(mt_edit_distance(guess, wrong) <= 1);
    }
    assert_null(mt_key_suggest("train", "something_else_entirely"));
    assert_string_equal(mt_key_suggest(NULL, "optimiser"), "optimizer");
}

TEST(the_table_describes_itself)
{
    MT_STR_FREED struct mt_str plain = {0}, md = {0}, ini = {0};
    mt_config_describe(&plain, false);
    mt_config_describe(&md, true);
    mt_config_write_template(&ini, "/a/model");
    for (size_t i = 0; i < mt_n_keys(); i++) {
        char name[128];
        snprintf(name, sizeof(name), "%s.%s = ", mt_key_at(i)->section, mt_key_at(i)->name);
        assert_non_null(strstr(plain.p, name));
        snprintf(name, sizeof(name), "| `%s` |", mt_key_at(i)->name);
        assert_non_null(strstr(md.p, name));
        snprintf(name, sizeof(name), "\n%s = ", mt_key_at(i)->name);
        assert_non_null(strstr(ini.p, name));
    }
    assert_non_null(strstr(md.p, "One of `auto`, `host`, `disk`. |"));
}

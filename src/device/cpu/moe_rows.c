/* SPDX-License-Identifier: Apache-2.0 */
/* Gathers rows of tokens for an expert, and adds outputs of experts to the tokens' sums. */
#include <string.h>

#include "device/cpu/cpu.h"

/* Rounds as mt_cpu_store_row() does. */
MT_HOT static void weigh_bf16(uint16_t *restrict dst, const uint16_t *restrict src, float w, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        uint32_t u = mt_f32_bits(w * mt_bf16_to_f32(src[i]));
        uint32_t nan = (u >> 16) | 0x40, even = (u + 0x7fffu + ((u >> 16) & 1)) >> 16;
        dst[i] = (uint16_t)((u & 0x7fffffffu) > 0x7f800000u ? nan : even);
    }
}

static void gather_row(const void *args, size_t row)
{
    const struct mt_moe_gather *a = args;
    size_t entry = row < a->n ? (size_t)a->list[row] : 0, bytes = a->c * mt_dtype_size(a->dtype);
    char *dst = (char *)a->out + row * bytes;
    const char *src = (const char *)a->x + entry / a->k * bytes;
    if (row >= a->n)
        memset(dst, 0, bytes);
    else if (!a->weights)
        memcpy(dst, src, bytes);
    else if (a->dtype == MT_BF16)
        weigh_bf16((uint16_t *)(void *)dst, (const uint16_t *)(const void *)src, a->weights[entry], a->c);
    else
        mt_cpu_scale((float *)(void *)dst, (const float *)(const void *)src, a->weights[entry], a->c);
}

void mt_cpu_run_moe_gather(struct mt_cpu_device *d, const struct mt_moe_gather *a)
{
    mt_cpu_by_rows(d, gather_row, a, a->n_padded, a->c);
}

MT_HOT static void add_bf16(float *restrict sum, const uint16_t *restrict src, float w, size_t n)
{
    for (size_t i = 0; i < n; i++)
        sum[i] += w * mt_bf16_to_f32(src[i]);
}

/* The token's first entry from row `from` of src on; rows are counted from the last one if a->down. Returns its row;
 * a->rows: there is none. */
static size_t next_entry(const struct mt_moe_combine *a, size_t token, size_t from, size_t *entry)
{
    size_t best = a->rows;
    for (size_t e = token * a->k; e < (token + 1) * a->k; e++) {
        size_t row = (size_t)(a->places[e] - (int64_t)a->first); /* huge if it is before */
        if (row >= a->rows)
            continue;
        row = a->down ? a->rows - 1 - row : row;
        if (row >= from && row < best) {
            best = row;
            *entry = e;
        }
    }
    return best;
}

static void combine_token(const void *args, size_t token)
{
    const struct mt_moe_combine *a = args;
    size_t entry = 0, at = 0;
    while ((at = next_entry(a, token, at, &entry)) < a->rows) {
        size_t row = a->down ? a->rows - 1 - at : at;
        float *sum = a->sum + token * a->c, w = a->weights ? a->weights[entry] : 1.0f;
        if (a->dtype == MT_BF16)
            add_bf16(sum, (const uint16_t *)a->src + row * a->c, w, a->c);
        else
            mt_cpu_add_scaled(sum, (const float *)a->src + row * a->c, w, a->c);
        at++;
    }
}

void mt_cpu_run_moe_combine(struct mt_cpu_device *d, const struct mt_moe_combine *a)
{
    mt_cpu_by_rows(d, combine_token, a, a->n, a->c);
}

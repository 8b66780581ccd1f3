/* SPDX-License-Identifier: Apache-2.0 */
/* Host memory of the program itself. */
#include "base/mem.h"
#include "plan/search.h"

/* Measured on runs of small and large models. Everything else is resident when the device is opened. */
enum {
    KIB = 1 << 10,
    MIB = 1 << 20,
    LISTS = 7 * MIB / 2,        /* programs, events, metrics; pages of tokens */
    CODE = 8 * MIB,             /* pages of libraries, generated code and thread caches not touched at first */
    CODE_OF_LENGTH = 128 * KIB, /* of products that are made for each number of rows */
    CODE_OF_LENGTHS = 24 * MIB, /* of all that are kept */
    STACK = 32 * KIB,           /* used by a thread */
    OWN_THREADS = 12,           /* of queues and data; compute and optimizer threads come on top */
    TENSOR = 768,               /* names, and entries in lists of files read and written */
    TOKEN = 3 * 40,             /* eight arrays and two sums per token; two steps' batches and the uploaded one */
    SAVED_PIECE = MIB,          /* of a tensor that is being saved to a checkpoint */
    UNIT_ON_DRIVES = 96 * KIB,
    UNKNOWN = 32 * MIB,         /* program and libraries, if not measured here */
    UNKNOWN_THREAD = 5 * MIB,
};

/* Memory to load a packed tensor: its codes and scales, or for a tensor stored wider the buffers that pack a piece.
 * Codes that may be put into another order are there twice. */
static uint64_t packing_bytes(const struct mt_tensor *t)
{
    uint64_t codes = mt_packed_code_bytes(t->packed, (size_t)t->shape[0], (size_t)t->shape[1]);
    bool turned = mt_packed_kind(t->packed) == MT_PACKED_INT4 && !t->in_file;
    uint64_t read = (turned ? 2 : 1) * codes + 5 * MIB;
    return MT_MAX(read, 9 * MT_MIN((uint64_t)t->n, (uint64_t)MIB)) + t->n / 16;
}

/* The library keeps code for each number of rows that it has met, which rows of several lengths bring. */
static uint64_t product_bytes(const struct mt_plan_request *r)
{
    bool makes = r->makes_products && r->numerics.dtype == MT_BF16;
    return makes ? MT_MIN((uint64_t)r->numerics.seq_len * CODE_OF_LENGTH, (uint64_t)CODE_OF_LENGTHS) : 0;
}

uint64_t mt_plan_loading_bytes(const struct mt_plan_request *r)
{
    const struct mt_layout *layout = r->layout;
    uint64_t largest = 0, packing = 0;
    for (const struct mt_tensor *t = layout->tensors; t < layout->tensors + layout->n_tensors; t++) {
        largest = MT_MAX(largest, (uint64_t)t->n * 4);
        packing = MT_MAX(packing, t->packed ? packing_bytes(t) : 0);
    }
    return MT_MIN(largest, (uint64_t)SAVED_PIECE) + MT_MAX(packing, product_bytes(r));
}

uint64_t mt_plan_process_bytes(const struct mt_plan_request *r, uint64_t tokens_per_step)
{
    uint64_t threads = (uint64_t)r->placement.threads;
    if (r->process)
        return r->process;
    return (r->resident ? r->resident : UNKNOWN + threads * UNKNOWN_THREAD) + LISTS + CODE +
           (2 * threads + OWN_THREADS) * STACK + r->layout->n_tensors * TENSOR + tokens_per_step * TOKEN +
           (r->loading ? r->loading : mt_plan_loading_bytes(r));
}

uint64_t mt_plan_drive_bytes(const struct mt_layout *layout)
{
    return layout->n_units * UNIT_ON_DRIVES;
}

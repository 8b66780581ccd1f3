/* SPDX-License-Identifier: Apache-2.0 */
#include "optim/optimizer.h"

#include <assert.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "base/mem.h"

/* Each is defined in a file of its own (MT_OPTIMIZER). A new optimizer is that file and an entry here. */
#define OPTIMIZERS(X) \
    X(adamw) \
    X(lion) \
    X(sgd) \
    X(adafactor) \
    X(muon) \
    X(apollo) \
    X(galore) \
    X(mezo)

#define DECLARE(type) extern const struct mt_optimizer *const mt_optimizer_##type[];
OPTIMIZERS(DECLARE)
#define ROW(type) mt_optimizer_##type,
static const struct mt_optimizer *const *const optimizers[] = {OPTIMIZERS(ROW)};
#define NAME(type) "|" #type
const char mt_optimizer_types[] = OPTIMIZERS(NAME);

const struct mt_optimizer *mt_optimizer_at(size_t k)
{
    for (size_t i = 0; i < MT_ARRAY_LEN(optimizers); i++)
        for (const struct mt_optimizer *const *o = optimizers[i]; *o; o++) {
            if (!k--)
                return *o;
            if (!o[1] && (*o)->if_zero && !k--)
                return (*o)->if_zero;
        }
    return NULL;
}

/* NULL: it has none of that name, or is NULL. */
static const struct mt_optimizer_key *own_key(const struct mt_optimizer *o, const char *name)
{
    for (int i = 0; o && i < o->n_keys; i++)
        if (!strcmp(o->keys[i].key.name, name))
            return &o->keys[i];
    return NULL;
}

double mt_optimizer_key(const struct mt_optimizer *o, const double slots[MT_OPTIMIZER_SLOTS], const char *name)
{
    const struct mt_optimizer_key *key = own_key(o, name);
    double value = key && slots ? slots[mt_optimizer_slot_of(name)] : MT_AUTO;
    return !key ? 0 : value == MT_AUTO ? key->def : value;
}

const struct mt_optimizer *mt_optimizer_find(const char *type, enum mt_state_type state_type,
                                             const double slots[MT_OPTIMIZER_SLOTS])
{
    const struct mt_optimizer *o;
    for (size_t i = 0; (o = mt_optimizer_at(i)); i++)
        if (!strcmp(o->type, type) && o->state_type == state_type)
            return o->if_zero && !mt_optimizer_key(o, slots, o->keys[0].key.name) ? o->if_zero : o;
    return NULL;
}

bool mt_optimizer_takes(const struct mt_optimizer *o, enum mt_master master)
{
    return master == MT_MASTER_F32 || o->lean_masters;
}

bool mt_update_form_at(size_t i, struct mt_update_form *f)
{
    for (size_t row = 0; (f->optimizer = mt_optimizer_at(row)); row++) {
        const struct mt_optimizer *o = f->optimizer;
        bool rounds = o->state_type == MT_STATE_BF16 && o->n_states && !o->direct;
        for (int master = MT_MASTER_F32; master < MT_N_MASTERS; master++)
            for (int chance = 0; chance <= rounds && mt_optimizer_takes(o, (enum mt_master)master); chance++) {
                f->master = (enum mt_master)master;
                f->stochastic = chance;
                if (!i--)
                    return true;
            }
    }
    return false;
}

void mt_update_form_name(const struct mt_update_form *f, char name[MT_OPTIMIZER_NAME])
{
    static const char *const types[] = {[MT_STATE_F32] = "f32", [MT_STATE_BF16] = "bf16", [MT_STATE_8BIT] = "8bit"};
    static const char *const masters[] = {[MT_MASTER_F32] = "", [MT_MASTER_24BIT] = "/24bit", [MT_MASTER_BF16] = "/bf16"};
    const struct mt_optimizer *o = f->optimizer;
    snprintf(name, MT_OPTIMIZER_NAME, "%s/%s%s%s", o->type, o->n_states ? types[o->state_type] : "none", masters[f->master],
             f->stochastic ? "/stochastic" : "");
}

/* --- keys ----------------------------------------------------------------------------------------------------- */

/* Key k of all types' keys, each time that it is named; NULL: there are fewer. */
static const struct mt_optimizer_key *key_at(size_t k, const struct mt_optimizer **of)
{
    for (size_t i = 0; i < MT_ARRAY_LEN(optimizers); i++) {
        *of = *optimizers[i];
        if (k < (size_t)(*of)->n_keys)
            return &(*of)->keys[k];
        k -= (size_t)(*of)->n_keys;
    }
    return NULL;
}

static bool is_first(size_t k)
{
    const struct mt_optimizer *of;
    const char *name = key_at(k, &of)->key.name;
    for (size_t i = 0; i < k; i++)
        if (!strcmp(key_at(i, &of)->key.name, name))
            return false;
    return true;
}

/* Reading a configuration asks for slots thousands of times. */
static const struct mt_optimizer_key *slot_table[MT_OPTIMIZER_SLOTS];
static size_t n_slots;
static pthread_once_t slots_listed = PTHREAD_ONCE_INIT;

static void list_slots(void)
{
    const struct mt_optimizer *of;
    const struct mt_optimizer_key *key;
    for (size_t k = 0; (key = key_at(k, &of)); k++)
        if (is_first(k)) {
            assert(n_slots < MT_OPTIMIZER_SLOTS);
            slot_table[n_slots++] = key;
        }
}

size_t mt_optimizer_n_slots(void)
{
    pthread_once(&slots_listed, list_slots);
    return n_slots;
}

const struct mt_optimizer_key *mt_optimizer_slot(size_t slot)
{
    return slot < mt_optimizer_n_slots() ? slot_table[slot] : NULL;
}

size_t mt_optimizer_slot_of(const char *key)
{
    size_t slot = 0;
    while (strcmp(mt_optimizer_slot(slot)->key.name, key))
        slot++;
    return slot;
}

void mt_optimizer_defaults(size_t slot, struct mt_str *out)
{
    const char *name = mt_optimizer_slot(slot)->key.name, *sep = "";
    const struct mt_optimizer *of;
    const struct mt_optimizer_key *key;
    for (size_t k = 0; (key = key_at(k, &of)); k++) {
        if (strcmp(key->key.name, name))
            continue;
        mt_str_printf(out, "%s%s ", sep, of->type);
        mt_str_number(out, key->def);
        sep = ", ";
    }
}

bool mt_optimizer_default(const char *type, const char *name, double *def)
{
    const struct mt_optimizer *of;
    const struct mt_optimizer_key *key;
    for (size_t k = 0; (key = key_at(k, &of)); k++)
        if (!strcmp(of->type, type) && !strcmp(key->key.name, name)) {
            *def = key->def;
            return true;
        }
    return false;
}

int mt_optimizer_resolve_keys(const struct mt_optimizer *o, double slots[MT_OPTIMIZER_SLOTS], struct mt_err *err)
{
    for (size_t s = 0; s < mt_optimizer_n_slots(); s++) {
        const char *name = mt_optimizer_slot(s)->key.name;
        const struct mt_optimizer_key *key = own_key(o, name);
        if (!key && slots[s] != MT_AUTO)
            return mt_fail(err, MT_ERR_USAGE, -EINVAL, "optimizer.%s is set, but optimizer.type = %s has no such key: "
                           "remove it", name, o->type);
        if (key && slots[s] == MT_AUTO)
            slots[s] = key->def;
    }
    return 0;
}

void mt_optimizer_own_keys(const struct mt_optimizer *o, const double slots[MT_OPTIMIZER_SLOTS],
                           double own[MT_OPTIMIZER_SLOTS])
{
    for (int i = 0; i < o->n_keys; i++)
        own[i] = slots[mt_optimizer_slot_of(o->keys[i].key.name)];
}

/* --- bytes ---------------------------------------------------------------------------------------------------- */

static const struct mt_state_shape a_matrix = {
    .n_dims = 2, .matrix = true, .rows = MT_PIECE_ALIGN, .cols = 1, .n = MT_PIECE_ALIGN};

static double bytes_of(const struct mt_optimizer_state *s)
{
    if (s->bytes)
        return (double)s->bytes(&a_matrix) / (double)a_matrix.n;
    return (double)s->block_bytes / (double)s->block;
}

double mt_optimizer_state_bytes(const struct mt_optimizer *o)
{
    double sum = 0;
    for (int i = 0; i < o->n_states; i++)
        sum += bytes_of(&o->state[i]);
    return sum;
}

double mt_optimizer_bytes(const struct mt_optimizer *o, enum mt_master master, enum mt_dtype grad_dtype)
{
    double weight = (double)(mt_dtype_size(MT_BF16) + mt_master_lo_bytes(master)), state = 0; /* weight: hi and lo */
    for (int i = 0; i < o->n_states; i++)
        state += o->state[i].on_device ? 0 : bytes_of(&o->state[i]);
    return 2 * (weight + state) + (o->zeroth ? 0 : (double)mt_dtype_size(grad_dtype));
}

double mt_optimizer_thread_ns(const struct mt_optimizer *o, enum mt_master master)
{
    const double plain = 0.55, random = 0.5;
    return master == MT_MASTER_BF16 ? (o->thread_ns > 0 ? o->thread_ns : plain) + random : o->thread_ns;
}

bool mt_optimizer_gathers(const struct mt_optimizer *o)
{
    bool fits = !o || (o->grain != MT_GRAIN_TENSOR && !o->direct && !o->zeroth);
    for (int i = 0; o && i < o->n_states; i++) {
        const struct mt_optimizer_state *s = &o->state[i];
        fits &= s->apart ? bytes_of(s) <= 0 : s->block_bytes <= MT_GATHER_STATE_BYTES * s->block;
    }
    return fits;
}

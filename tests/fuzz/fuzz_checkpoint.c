/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Up to its first NUL the input is state.json, or manifest.json if its first byte is a space; the rest is seal.json. If
 * there is no rest, the seal is right, so that what it seals is read.
 */
#define XXH_INLINE_ALL
#include <xxhash.h>

#include "checkpoint/checkpoint.h"
#include "checkpoint/seal.h"
#include "fuzz.h"

static void check_state(const char *dir)
{
    struct mt_train_state s = {0}, again = {0};
    struct mt_err err = {0};
    if (mt_checkpoint_read_state(dir, &s, &err)) {
        fuzz_assert(err.msg[0]);
        return;
    }
    cJSON *o = mt_train_state_to_json(&s);
    fuzz_assert(o && s.config);
    fuzz_assert(!mt_train_state_from_json(&again, o, "again", &err)); /* what was read can be written and read again */
    fuzz_assert(again.step == s.step && again.updates == s.updates && again.data_hash == s.data_hash);
    cJSON_Delete(o);
    mt_train_state_finish(&s);
    mt_train_state_finish(&again);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    const uint8_t *rest;
    char state[256], manifest[256];
    size_t n_rest, n = fuzz_split(data, size, &rest, &n_rest);
    bool full = !n || data[0] != ' ';
    const char *name = full ? MT_STATE_NAME : MT_MANIFEST_NAME, *dir = fuzz_folder();
    snprintf(state, sizeof(state), "%s/megatrain/%s", dir, MT_STATE_NAME);
    snprintf(manifest, sizeof(manifest), "%s/megatrain/%s", dir, MT_MANIFEST_NAME);
    unlink(state);
    unlink(manifest);
    fuzz_put(full ? "megatrain/" MT_STATE_NAME : "megatrain/" MT_MANIFEST_NAME, data, n);
    char *seal = mt_seal_text(name, XXH3_64bits(data, n));
    fuzz_put("megatrain/seal.json", n_rest ? (const char *)rest : seal, n_rest ? n_rest : strlen(seal));
    free(seal);
    fuzz_put("model.safetensors", "\2\0\0\0\0\0\0\0{}", 10);
    MT_SEALED_FREED struct mt_sealed sealed = {0};
    struct mt_checkpoint_id id = {0};
    struct mt_err err = {0};
    int rc = mt_seal_read(dir, &sealed, &err);
    fuzz_assert(!rc == (sealed.json != NULL) && (!rc || err.msg[0]));
    if (!mt_checkpoint_identify(dir, &id, &err)) {
        fuzz_assert(!rc);
        mt_checkpoint_id_finish(&id);
    }
    rc = mt_checkpoint_verify(dir, &err);
    fuzz_assert(!rc || err.msg[0]);
    mt_checkpoint_check_whole(dir, &err);
    check_state(dir);
    return 0;
}

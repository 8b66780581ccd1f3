/* SPDX-License-Identifier: Apache-2.0 */
#include "checkpoint/seal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/fs.h"
#include "base/json.h"
#include "base/mem.h"

int mt_checkpoint_damaged(struct mt_err *err, const char *path, const char *what)
{
    return mt_fail(err, MT_ERR_CHECKPOINT, -EBADMSG, "%s: %s", path, what);
}

bool mt_checkpoint_is_damage(int rc)
{
    return rc == -EBADMSG || rc == -ENOENT || rc == -ENOTDIR || rc == -EISDIR || rc == -EINVAL;
}

/* Is it there? What cannot be looked at may be: -errno. */
static int look_for(const char *path, bool *is, struct mt_err *err)
{
    *is = !access(path, F_OK);
    return *is || errno == ENOENT || errno == ENOTDIR
               ? 0 : mt_fail(err, MT_ERR_CHECKPOINT, -errno, "cannot read %s: %s", path, strerror(errno));
}

/* Verifies the seal itself, and returns the checksum of the sealed file. */
static int read_seal(const char *path, const char *name, char want[MT_SUM_TEXT], struct mt_err *err)
{
    MT_FREED char *text = NULL, *whole = NULL;
    size_t len = 0;
    unsigned long long sum = 0;
    int rc = mt_read_file(path, &text, &len, err);
    if (rc) {
        if (err && rc != -ENOMEM)
            err->kind = MT_ERR_CHECKPOINT;
        return rc;
    }
    const char *colon = memchr(text, ':', len);
    bool ok = colon && sscanf(colon, ": \"%16llx", &sum) == 1;
    if (ok && !(whole = mt_seal_text(name, sum)))
        rc = mt_fail_nomem(err, path, len);
    ok = ok && whole && len == strlen(whole) && !memcmp(text, whole, len);
    if (rc || !ok)
        return rc ?: mt_checkpoint_damaged(err, path, "it is not what was written");
    mt_sum_format(want, sum);
    return 0;
}

int mt_sealed_share(const struct mt_sealed *s)
{
    return MT_MAX(atoi(mt_json_string(s->json, "share_layers", "1")), 1);
}

void mt_sealed_finish(struct mt_sealed *s)
{
    cJSON_Delete(s->json);
}

int mt_seal_read(const char *dir, struct mt_sealed *out, struct mt_err *err)
{
    char path[4096], seal[4096], want[MT_SUM_TEXT];
    uint64_t sum, size;
    const char *name = MT_STATE_NAME;
    mt_path_printf(path, sizeof(path), "%s/megatrain/" MT_STATE_NAME, dir);
    mt_path_printf(seal, sizeof(seal), "%s/megatrain/seal.json", dir);
    bool weights = false;
    int rc = look_for(path, &out->full, err);
    if (!rc && !out->full) {
        name = MT_MANIFEST_NAME;
        mt_path_printf(path, sizeof(path), "%s/megatrain/" MT_MANIFEST_NAME, dir);
        rc = look_for(path, &weights, err);
        if (!rc && !weights) {
            mt_path_printf(seal, sizeof(seal), "%s/latest", dir);
            return mt_path_exists(seal)
                       ? mt_fail(err, MT_ERR_CHECKPOINT, -ENOENT,
                                 "%s is the folder of a run: name one of its checkpoints, such as %s", dir, seal)
                       : mt_fail(err, MT_ERR_CHECKPOINT, -ENOENT,
                                 mt_path_exists(dir) ? "%s: holds no training state (megatrain/state.json)" : "%s: no such folder", dir);
        }
    }
    rc = rc ?: read_seal(seal, name, want, err)
            ?: mt_sum_file(path, 0, UINT64_MAX, &sum, &size, err);
    if (rc)
        return rc;
    mt_sum_format(out->sum, sum);
    if (strcmp(out->sum, want))
        return mt_checkpoint_damaged(err, path, "its checksum is not the one in its seal");
    return mt_json_read_file(&out->json, path, MT_ERR_CHECKPOINT, err);
}

void mt_checkpoint_id_finish(struct mt_checkpoint_id *id)
{
    mt_lineage_finish(&id->lineage);
}

int mt_checkpoint_identify(const char *dir, struct mt_checkpoint_id *out, struct mt_err *err)
{
    struct mt_checkpoint_id id = {0};
    MT_SEALED_FREED struct mt_sealed s = {.json = NULL};
    char *end = NULL;
    int rc = mt_seal_read(dir, &s, err);
    if (rc)
        return rc;
    memcpy(id.sum, s.sum, sizeof(id.sum));
    id.full = s.full;
    const cJSON *step = mt_json_get(s.json, "step");
    id.step = cJSON_IsString(step) ? strtoull(step->valuestring, &end, 10) : 0;
    if (!end || *end || end == step->valuestring)
        rc = mt_checkpoint_damaged(err, dir, "it has no step");
    rc = rc ?: mt_lineage_from_json(&id.lineage, s.json, dir, err);
    if (!rc)
        *out = id;
    return rc;
}

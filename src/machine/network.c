/* SPDX-License-Identifier: Apache-2.0 */
#include "machine/network.h"

#include <math.h>
#include <string.h>

#include "base/fs.h"
#include "base/json.h"
#include "base/mem.h"

void mt_network_path(char *buf, size_t len)
{
    char dir[4000];
    mt_cache_dir(dir, sizeof(dir));
    mt_path_printf(buf, len, "%s/network.json", dir);
}

int mt_network_write(const struct mt_network *n, const char *path, struct mt_err *err)
{
    MT_JSON_FREED cJSON *o = cJSON_CreateObject();
    mt_json_put(o, "gbs=%f, us=%f, cores=%f, hosts=%f", n->gbs, n->us, n->cores, (double)n->hosts);
    MT_FREED char *text = mt_json_print(o, true);
    int rc = text ? mt_make_parent(path, err) : mt_fail_nomem(err, "a profile of the network", 256);
    return rc ?: mt_write_file(path, text, strlen(text), err);
}

int mt_network_read(struct mt_network *out, const char *path, struct mt_err *err)
{
    MT_JSON_FREED cJSON *o = NULL;
    if (!mt_path_exists(path))
        return mt_fail(err, MT_ERR_RUNTIME, -ENOENT, "no network was measured: megatrain probe net, under a launcher");
    int rc = mt_json_read_file(&o, path, MT_ERR_RUNTIME, err);
    if (rc)
        return rc;
    struct mt_network n = {mt_json_number(o, "gbs", NAN), mt_json_number(o, "us", NAN), mt_json_number(o, "cores", NAN), 0};
    double hosts = mt_json_number(o, "hosts", NAN);
    if (!(n.gbs > 0 && n.gbs < 1e6 && n.us >= 0 && n.us < 1e9 && n.cores >= 0 && n.cores < 1e6 && hosts >= 2 &&
          hosts < 1e6))
        return mt_fail(err, MT_ERR_RUNTIME, -EINVAL, "%s is not as megatrain probe net writes it: remove it or measure again", path);
    n.hosts = (int)hosts;
    *out = n;
    return 0;
}

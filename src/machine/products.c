/* SPDX-License-Identifier: Apache-2.0 */
#include "machine/products.h"

#include <ctype.h>
#include <string.h>

#include "base/fs.h"
#include "base/mem.h"
#include "device/products.h"

/* "": the device has no choice. */
static void path_of(char *buf, size_t len, mt_device *dev)
{
    char dir[3800], of[200], name[sizeof(of)];
    size_t n = 0;
    mt_device_products_of(dev, of, sizeof(of));
    for (const char *at = of; *at; at++)
        if (isalnum((unsigned char)*at) || *at == '.')
            name[n++] = *at;
        else if (n && name[n - 1] != '-')
            name[n++] = '-';
    name[n] = 0;
    *buf = 0;
    mt_cache_dir(dir, sizeof(dir));
    if (n)
        mt_path_printf(buf, len, "%s/products-%s.txt", dir, name);
}

int mt_products_load(mt_device *dev, struct mt_err *err)
{
    MT_FREED char *text = NULL;
    char path[4096];
    size_t len = 0;
    path_of(path, sizeof(path), dev);
    if (!path[0] || !mt_path_exists(path))
        return 0;
    int rc = mt_read_file(path, &text, &len, err);
    if (!rc && !mt_device_adopt_products(dev, text))
        rc = mt_fail(err, MT_ERR_RUNTIME, -EINVAL, "%s is not as megatrain plan --measure writes it: remove it", path);
    return rc;
}

int mt_products_save(mt_device *dev, const char *text, struct mt_err *err)
{
    char path[4096];
    path_of(path, sizeof(path), dev);
    return mt_make_parent(path, err) ?: mt_write_file(path, text, strlen(text), err);
}

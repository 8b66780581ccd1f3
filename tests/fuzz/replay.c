/* SPDX-License-Identifier: Apache-2.0 */
/* Reads each file of a folder once, as a fuzzer that has found it would. */
#include <dirent.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/fs.h"
#include "fuzz.h"

static void replay(const char *path)
{
    FILE *f = fopen(path, "re");
    fuzz_assert(f && !fseek(f, 0, SEEK_END));
    size_t size = (size_t)ftell(f);
    uint8_t *data = malloc(size + !size);
    rewind(f);
    fuzz_assert(data && fread(data, 1, size, f) == size);
    fclose(f);
    fuzz_assert(!LLVMFuzzerTestOneInput(data, size));
    free(data);
}

int main(int, char **argv)
{
    char path[4096];
    size_t n = 0;
    DIR *dir = opendir(argv[1]);
    fuzz_assert(dir);
    for (const struct dirent *e; (e = readdir(dir));) {
        if (e->d_name[0] == '.')
            continue;
        snprintf(path, sizeof(path), "%s/%s", argv[1], e->d_name);
        replay(path);
        n++;
    }
    closedir(dir);
    struct mt_err err;
    fuzz_assert(!mt_remove_tree(fuzz_folder(), &err));
    printf("%zu inputs were read\n", n);
    return n == 0;
}

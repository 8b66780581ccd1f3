/* SPDX-License-Identifier: Apache-2.0 */
#include "net/net.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "net/net_priv.h"

enum { DEADLINE_S = 300 }; /* until the configuration says another */

bool mt_net_is_launched(void)
{
    const char *const n[] = {getenv("OMPI_COMM_WORLD_SIZE"), getenv("PMI_SIZE"), getenv("SLURM_STEP_NUM_TASKS")};
    bool launched = n[0] || n[1] || getenv("PMIX_RANK");
    for (size_t i = 0; i < sizeof(n) / sizeof(n[0]) && launched; i++)
        if (n[i])
            return strcmp(n[i], "1") != 0;
    return launched; /* PMIx names no size: MPI asks it */
}

/* A module of a build folder, or of where the program is installed. */
static void *open_named(const char *name)
{
    static const char *const near[] = {"../src/net", "../lib/megatrain"};
    char exe[3000], path[3200];
    ssize_t n = readlink("/proc/self/exe", exe, sizeof(exe) - 1);
    exe[n > 0 ? n : 0] = 0;
    char *slash = strrchr(exe, '/');
    if (slash)
        *slash = 0;
    void *lib = NULL;
    for (size_t i = 0; i < sizeof(near) / sizeof(near[0]) && !lib; i++) {
        snprintf(path, sizeof(path), "%s/%s/%s", exe, near[i], name);
        lib = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    }
    snprintf(path, sizeof(path), "%s/%s", MT_NET_MODULES, name);
    return lib ?: dlopen(path, RTLD_NOW | RTLD_LOCAL);
}

/* That of MPICH, where there is one besides, for what MPICH's launchers have started. */
static void *open_module(void)
{
    bool mpich = getenv("PMI_SIZE") && !getenv("OMPI_COMM_WORLD_SIZE");
    void *lib = mpich ? open_named("megatrain-net-mpich.so") : NULL;
    return lib ?: open_named("megatrain-net-mpi.so");
}

int mt_net_open(mt_net **out, struct mt_err *err)
{
    *out = NULL;
    if (!mt_net_is_launched())
        return 0;
    void *lib = open_module();
    mt_net_open_fn *open;
    mt_wire *wire = NULL;
    void *entry = lib ? dlsym(lib, MT_NET_MPI_OPEN) : NULL;
    memcpy(&open, &entry, sizeof(open));
    if (open) {
        int rc = open(&wire, err);
        return rc || !wire ? rc : mt_net_create(out, wire, DEADLINE_S, err);
    }
    const char *why = dlerror();
    return mt_fail(err, MT_ERR_USAGE, -ENOENT, "a launcher has started several processes, but this build has no MPI to join them, or "
                   "its module is no longer beside the program (%s): install libopenmpi-dev or libmpich-dev and build again, or start one process", why ? why : "no module");
}

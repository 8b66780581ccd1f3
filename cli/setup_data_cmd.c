/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/fs.h"
#include "cli.h"
#include "data/helper.h"

/* Runs setup_data.py, which lies beside the data helper, in place of this process. */
int cli_cmd_setup_data(struct cli *, const struct cli_args *, struct mt_err *)
{
    char *dir = mt_helper_dir(), script[4096], home[4096], target[4096];
    if (!dir) {
        fprintf(stderr, "megatrain: the data helper is not found: set MEGATRAIN_DATA_HELPER to its path\n");
        return EXIT_RUNTIME;
    }
    mt_path_printf(script, sizeof(script), "%s/setup_data.py", dir);
    mt_data_home(home, sizeof(home));
    mt_path_printf(target, sizeof(target), "%s/python", home);
    free(dir);
    execlp("python3", "python3", script, target, (char *)NULL);
    fprintf(stderr, "megatrain: cannot run python3: %s\n", strerror(errno));
    return EXIT_RUNTIME;
}

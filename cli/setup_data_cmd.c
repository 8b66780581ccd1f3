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
    MT_FREED char *dir = mt_helper_dir();
    char home[4096];
    if (!dir) {
        fprintf(stderr, "megatrain: the data helper is not found: set MEGATRAIN_DATA_HELPER to its path\n");
        return EXIT_RUNTIME;
    }
    mt_data_home(home, sizeof(home));
    execlp("python3", "python3", MT_PATH("%s/setup_data.py", dir), MT_PATH("%s/python", home), (char *)NULL);
    fprintf(stderr, "megatrain: cannot run python3: %s\n", strerror(errno));
    return EXIT_RUNTIME;
}

/* SPDX-License-Identifier: Apache-2.0 */
#include <stdio.h>
#include <string.h>

#include "cli.h"

static void words(const struct cli_option *o, const char *before)
{
    for (; o->name; o++)
        printf("%s--%s", before, o->name);
}

static void complete_bash(void)
{
    printf("_megatrain() {\n  local cur=${COMP_WORDS[COMP_CWORD]} words\n"
           "  if [ \"$COMP_CWORD\" = 1 ]; then words='");
    for (const struct cli_command *c = cli_commands; c->name; c++)
        printf("%s ", c->name);
    printf("'\n  else case ${COMP_WORDS[1]} in\n");
    for (const struct cli_command *c = cli_commands; c->name; c++) {
        printf("    %s) words='", c->name);
        words(c->options, " ");
        words(cli_global_options, " ");
        printf("' ;;\n");
    }
    printf("  esac; fi\n  COMPREPLY=($(compgen -W \"$words\" -- \"$cur\") $(compgen -f -- \"$cur\"))\n"
           "}\ncomplete -o filenames -F _megatrain megatrain\n");
}

static void complete_fish(void)
{
    for (const struct cli_command *c = cli_commands; c->name; c++) {
        printf("complete -c megatrain -n __fish_use_subcommand -a %s -d '%s'\n", c->name, c->help);
        for (const struct cli_option *o = c->options; o->name; o++)
            printf("complete -c megatrain -n '__fish_seen_subcommand_from %s' -l %s\n", c->name,
                   o->name);
    }
}

int cli_cmd_completion(struct cli *cli, const struct cli_args *args)
{
    const char *shell = args->operands[0];
    (void)cli;
    if (!strcmp(shell, "bash")) {
        complete_bash();
    } else if (!strcmp(shell, "zsh")) {
        printf("autoload -U +X bashcompinit && bashcompinit\n");
        complete_bash();
    } else if (!strcmp(shell, "fish")) {
        complete_fish();
    } else {
        fprintf(stderr, "megatrain completion: bash, zsh or fish, not \"%s\"\n", shell);
        return EXIT_USAGE;
    }
    return 0;
}

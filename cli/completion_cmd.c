/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Scripts of shells. Everything that can be completed is in them, so that pressing a key starts no process: commands,
 * options, keys of the configuration with their choices (--set KEY=CHOICE), names of machines and models.
 */
#include <stdio.h>
#include <string.h>

#include "base/installed.h"
#include "base/mem.h"
#include "base/strbuf.h"
#include "cli.h"
#include "config/schema.h"

/* Options whose value is a name of a file that belongs to the program. */
static const struct named_option {
    const char *option, *folder, *ending;
} named[] = {{"machine", "machines", ".ini"}, {"model", "models", ".json"}};

static void print_names(const struct named_option *o)
{
    MT_STR_FREED struct mt_str names = {0};
    mt_installed_names(&names, o->folder, o->ending, NULL);
    for (const char *p = names.p; p && *p; p++)
        if (*p != ',') /* "a, b" */
            putchar(*p);
}

/* The choices of a key, with `before` each; or none. */
static void print_choices(const struct mt_key *key, const char *before)
{
    const char *list = key->type == MT_KEY_BOOL ? "on|off" : key->choices;
    for (const char *p = list; p && *p;) {
        int len = (int)strcspn(p, "|");
        printf("%s%.*s", before, len, p);
        p += len + (p[len] != 0);
    }
}

/* Between quotes of a shell that knows backslashes there. */
static void print_quoted(const char *text)
{
    for (; *text; text++)
        printf(*text == '\'' || *text == '\\' ? "\\%c" : "%c", *text);
}

static void words(const struct cli_option *o, const char *before)
{
    for (; o->name; o++)
        printf("%s--%s", before, o->name);
}

/* bash takes = for a word of its own: of --set KEY=VALUE, the words are --set, KEY, = and VALUE. */
static void complete_bash(void)
{
    printf("_megatrain() {\n  local cur=${COMP_WORDS[COMP_CWORD]} at=$((COMP_CWORD - 1)) words=\n"
           "  if [ \"$cur\" = = ]; then cur=; elif [ \"${COMP_WORDS[at]}\" = = ]; then at=$((at - 1)); fi\n"
           "  if [ \"$COMP_CWORD\" = 1 ]; then words='");
    for (const struct cli_command *c = cli_commands; c->name; c++)
        printf("%s ", c->name);
    printf("'\n  else case ${COMP_WORDS[at]} in\n    --set) compopt -o nospace; words='");
    for (size_t i = 0; i < mt_n_keys(); i++)
        printf("%s%s.%s=", i ? " " : "", mt_key_at(i)->section, mt_key_at(i)->name);
    printf("' ;;\n");
    for (size_t i = 0; i < MT_ARRAY_LEN(named); i++) {
        printf("    --%s) words='", named[i].option);
        print_names(&named[i]);
        printf("' ;;\n");
    }
    for (size_t i = 0; i < mt_n_keys(); i++) {
        const struct mt_key *key = mt_key_at(i);
        if (!key->choices && key->type != MT_KEY_BOOL)
            continue;
        printf("    %s.%s) words='", key->section, key->name);
        print_choices(key, " ");
        printf("' ;;\n");
    }
    printf("    *) case ${COMP_WORDS[1]} in\n");
    for (const struct cli_command *c = cli_commands; c->name; c++) {
        printf("      %s) words='", c->name);
        words(c->options, " ");
        words(cli_global_options, " ");
        printf("' ;;\n");
    }
    printf("    esac ;;\n  esac; fi\n  COMPREPLY=($(compgen -W \"$words\" -- \"$cur\") $(compgen -f -- \"$cur\"))\n"
           "}\ncomplete -o filenames -F _megatrain megatrain\n");
}

static void complete_fish_values(void)
{
    printf("complete -c megatrain -l set -x -a '");
    for (size_t i = 0; i < mt_n_keys(); i++) {
        const struct mt_key *key = mt_key_at(i);
        char before[128];
        snprintf(before, sizeof(before), " %s.%s=", key->section, key->name);
        printf("%s", before);
        print_choices(key, before);
    }
    printf("'\n");
    for (size_t i = 0; i < MT_ARRAY_LEN(named); i++) {
        printf("complete -c megatrain -l %s -r -a '", named[i].option);
        print_names(&named[i]);
        printf("'\n");
    }
}

static void complete_fish(void)
{
    for (const struct cli_command *c = cli_commands; c->name; c++) {
        printf("complete -c megatrain -n __fish_use_subcommand -a %s -d '", c->name);
        print_quoted(c->help);
        printf("'\n");
        for (const struct cli_option *o = c->options; o->name; o++)
            printf("complete -c megatrain -n '__fish_seen_subcommand_from %s' -l %s\n", c->name,
                   o->name);
    }
    complete_fish_values();
}

int cli_cmd_completion(struct cli *, const struct cli_args *args, struct mt_err *)
{
    const char *shell = args->operands[0];
    if (!strcmp(shell, "bash")) {
        complete_bash();
    } else if (!strcmp(shell, "zsh")) {
        printf("#compdef megatrain\nautoload -U +X bashcompinit && bashcompinit\n");
        complete_bash();
    } else if (!strcmp(shell, "fish")) {
        complete_fish();
    } else {
        return cli_usage("completion: bash, zsh or fish, not \"%s\"", shell);
    }
    return 0;
}

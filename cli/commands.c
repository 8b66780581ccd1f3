/* SPDX-License-Identifier: Apache-2.0 */
/* The table of commands and their options: parsing, help, manual and completion come from it. */
#include "cli.h"

#define SET {"set", 0, "SEC.KEY=VALUE", "Set a key of the configuration; may be repeated.", CLI_TEXT, 0, 0}
#define JSON {"json", 0, NULL, "Print JSON.", CLI_TEXT, 0, 0}
#define END {NULL, 0, NULL, NULL, CLI_TEXT, 0, 0}
/* Values of an option: whole numbers, numbers, sizes. */
#define WHOLE(min, max) CLI_WHOLE, min, max
#define REAL(min, max) CLI_REAL, min, max
#define SIZE(min, max) CLI_SIZE, min, max
#define ANY CLI_NO_LIMIT
#define GIB 0x1p30

const struct cli_option cli_global_options[] = {
    {"help", 'h', NULL, "Show help."},
    {"version", 'V', NULL, "Show the version; with -v, what this build has."},
    {"quiet", 'q', NULL, "Only errors."},
    {"verbose", 'v', NULL, "More; twice for debugging."},
    {"color", 0, "WHEN", "Colour: auto, always, never."},
    {"no-progress", 0, NULL, "No progress lines."},
    {"log-format", 0, "FORMAT", "Log lines as text or json."},
    {"no-input", 0, NULL, "Never ask (nothing ever asks)."},
    END};

static const struct cli_option run_options[] = {
    SET,
    {"resume", 0, "=WHICH", "Go on from the newest good checkpoint (auto), or from a folder."},
    {"force", 0, NULL, "Start anew: earlier checkpoints go once there is a new one. Resume despite other settings."},
    {"out", 0, "DIR", "Output folder, instead of checkpoint.dir."},
    {"max-steps", 0, "N", "Stop after N steps of this run.", WHOLE(1, ANY)},
    {"no-save", 0, NULL, "Save nothing at the end: for benchmarks."},
    {"trace", 0, "FILE", "Write a trace of the third step, for Perfetto."},
    {"rates", 0, "FILE", "Time a step's operations between the steps, too, into FILE: for benchmarks. Wants 'probe all' before."},
    {"tbw", 0, "SIZE", "Rated endurance of a drive of nvme_paths, such as 600TB, where SMART does not say.", SIZE(1, ANY)},
    {"dry-run", 0, NULL, "Show the plan and the memory table, then stop."},
    END};
static const struct cli_option plan_options[] = {
    SET,
    {"model", 0, "PATH", "A config.json, a model folder or a name, instead of model.path."},
    {"machine", 0, "FILE|NAME", "Plan for this machine (rtx4090, h100, ...), not for the one here."},
    {"gpu-mem", 0, "SIZE", "With --machine: its device memory, such as 24GiB."},
    {"host-mem", 0, "SIZE", "With --machine: its host memory, such as 256GiB."},
    {"pcie", 0, "RATE", "With --machine: its link, such as 25GB/s."},
    {"nvme", 0, "RATE", "With --machine: what one drive reads, such as 7GB/s."},
    {"drives", 0, "N", "With --machine: drives to stripe over.", WHOLE(1, 1024)},
    {"seq-len", 0, "N", "Shorthand of --set data.seq_len=N."},
    {"tokens-per-step", 0, "N", "Shorthand of --set train.tokens_per_step=N (64Ki)."},
    {"micro-batch", 0, "N", "Shorthand of --set train.micro_batch=N."},
    {"measure", 0, NULL, "First time this configuration's operations on this machine; kept."},
    JSON,
    END};
static const struct cli_option bench_options[] = {
    {"out", 0, "DIR", "Folder for results (SWEEP.bench beside the sweep file)."},
    {"resume", 0, NULL, "Go on: runs that are done are kept."},
    {"force", 0, NULL, "Start anew: earlier results are removed."},
    {"only", 0, "GLOB", "Only jobs whose name or values match."},
    {"predict-only", 0, NULL, "Predict every job, run none."},
    {"machine", 0, "FILE|NAME", "With --predict-only: for this machine."},
    {"measure", 0, NULL, "Measure the machine before and in each run: predictions with the rates of the same second."},
    {"compare", 0, NULL, "Operands are two result folders: what changed beyond the noise."},
    {"export-csv", 0, "FILE", "Also write the table there."},
    {"export-json", 0, "FILE", "Also write the table there."},
    {"export-markdown", 0, "FILE", "Also write the table there."},
    END};
static const struct cli_option report_options[] = {
    {"html", 0, "FILE", "The page to write (report.html in the first folder)."},
    {"svg", 0, "DIR", "Also write each picture as a file."},
    END};
static const struct cli_option check_options[] = {
    SET,
    {"adapter", 0, "DIR", "Also whether the adapters of this PEFT folder fit the model."},
    END};
static const struct cli_option data_options[] = {
    SET,
    {"samples", 0, "N", "show: how many (3).", WHOLE(0, ANY)},
    {"first", 0, "I", "show: from this one (0).", WHOLE(0, ANY)},
    {"html", 0, "FILE", "show: as a page."},
    JSON,
    END};
static const struct cli_option eval_options[] = {
    SET,
    {"model", 0, "DIR", "Evaluate this model instead of model.path."},
    {"adapter", 0, "DIR", "With the adapters of this PEFT folder, such as a checkpoint."},
    {"per-sample", 0, NULL, "Print the loss of every sample."},
    JSON,
    END};
static const struct cli_option sample_options[] = {
    {"model", 0, "DIR", "Model folder, or an adapter's, which names its model."},
    {"adapter", 0, "DIR", "With the adapters of this PEFT folder."},
    {"prompt", 0, "TEXT", "Text to continue."},
    {"chat", 0, NULL, "The prompt is a user's turn: put it into the model's chat template."},
    {"max-tokens", 0, "N", "Tokens to generate (128).", WHOLE(0, 1 << 24)},
    {"temperature", 0, "T", "0 takes the likeliest token (0.8).", REAL(0, 100)},
    {"seed", 0, "S", "Seed (0).", WHOLE(0, ANY)},
    END};
static const struct cli_option json_options[] = {JSON, END};
static const struct cli_option probe_options[] = {
    {"size", 0, "SIZE", "disk: bytes of the scratch file (1GiB).", SIZE(4096, ANY)},
    {"request", 0, "SIZE", "disk: bytes of a request to the kernel (1MiB).", SIZE(4096, GIB)},
    {"depth", 0, "N", "disk: requests under way in each direction (32).", WHOLE(1, 4096)},
    {"seconds", 0, "S", "disk: length of each measurement at least (3).", REAL(0, 3600)},
    {"io", 0, "HOW", "disk: io_uring or threads (the first where it is allowed)."},
    {"dir", 0, "DIR", "all: also measure the drive that this folder is on."},
    {"brief", 0, NULL, "all: rates alone; plan --measure times the operations that it needs."},
    {"threads", 0, "N", "all: measure for this many threads (as many as there are cores).", WHOLE(1, 4096)},
    {"device", 0, "KIND", "all, gemm: cpu, cuda, or auto: the GPU where there is one (auto)."},
    {"index", 0, "N", "all, gemm: which GPU (0).", WHOLE(0, 1024)},
    JSON,
    END};
static const struct cli_option inspect_options[] = {
    JSON,
    {"adapter", 0, "DIR", "The adapters of this PEFT folder; with a model, also whether they are for it."},
    END};
static const struct cli_option export_options[] = {
    {"dtype", 0, "TYPE", "bf16 (default), or f32 from the master weights. Adapters are f32."},
    {"base-dtype", 0, "FORMAT", "Pack the layers' matrices, as bitsandbytes and transformers read them: nf4 or fp8; "
                              "of gpt-oss the experts: mxfp4."},
    {"merge", 0, NULL, "Of adapters: the whole model, with what they say added to its weights."},
    {"model", 0, "DIR", "With --merge: the model, instead of the one that the adapters name."},
    {"shard-size", 0, "SIZE", "Largest file (5GB)."},
    END};
static const struct cli_option config_options[] = {
    SET,
    {"markdown", 0, NULL, "keys: as tables."},
    {"model", 0, "DIR", "init: the model."},
    END};
static const struct cli_option help_options[] = {
    {"man", 0, NULL, "Print the manual page."}, END};
static const struct cli_option no_options[] = {END};

const struct cli_command cli_commands[] = {
    {"run", "CONFIG.ini", "Train as the configuration says.", run_options, 1, 1, cli_cmd_run},
    {"plan", "[CONFIG.ini]", "Will it fit, and how long will it take? Needs neither weights nor data.",
     plan_options, 0, 1, cli_cmd_plan},
    {"bench", "SWEEP.ini | --compare DIR DIR", "Run a sweep of configurations; predicted and measured.",
     bench_options, 1, 2, cli_cmd_bench},
    {"report", "DIR...", "A page of pictures of runs and sweeps, also after a crash.", report_options, 1, 16,
     cli_cmd_report},
    {"check", "CONFIG.ini", "Read configuration, model and data without training.", check_options, 1,
     1, cli_cmd_check},
    {"data", "prepare|show|stats CONFIG.ini",
     "Make the tokens of the training data, show samples with what is trained, count.", data_options, 2,
     2, cli_cmd_data},
    {"eval", "CONFIG.ini", "Loss, perplexity and token accuracy on the evaluation data.",
     eval_options, 1, 1, cli_cmd_eval},
    {"sample", "", "Continue a text, or answer one: a look at a result.", sample_options, 0,
     0, cli_cmd_sample},
    {"inspect", "[FILE|DIR]", "Tensors, dtypes and configuration of a model, or of adapters.", inspect_options, 0, 1,
     cli_cmd_inspect},
    {"export", "CHECKPOINT_DIR OUT_DIR", "Write a Hugging Face folder alone: of the model, or of adapters (PEFT's).", export_options, 2, 2,
     cli_cmd_export},
    {"verify", "DIR", "Check every file of a checkpoint.", no_options, 1, 1, cli_cmd_verify},
    {"doctor", "", "What this machine has and what of it is usable.", json_options, 0, 0,
     cli_cmd_doctor},
    {"probe", "[all|copy|gemm|adam|disk [DIR]]", "Measure this machine or its GPU; all is kept for plan, run and bench.",
     probe_options, 0, 2, cli_cmd_probe},
    {"config", "show CONFIG.ini | keys | init", "Show, explain or start a configuration.",
     config_options, 1, 2, cli_cmd_config},
    {"completion", "bash|zsh|fish", "Print a shell completion script.", no_options, 1, 1,
     cli_cmd_completion},
    {"help", "[COMMAND|environment]", "Show help.", help_options, 0, 1, cli_cmd_help},
    {NULL, NULL, NULL, NULL, 0, 0, NULL}};

/* SPDX-License-Identifier: Apache-2.0 */
/* The table of commands and their options: parsing, help, manual and completion come from it. */
#include "cli.h"

#define SET {"set", 0, "SEC.KEY=VALUE", "Set a key of the configuration; may be repeated.", CLI_TEXT, 0, 0}
#define JSON {"json", 0, NULL, "Print JSON.", CLI_TEXT, 0, 0}
#define END {NULL, 0, NULL, NULL, CLI_TEXT, 0, 0}
/* Values of an option: integers, numbers, sizes. */
#define WHOLE(min, max) CLI_WHOLE, min, max
#define REAL(min, max) CLI_REAL, min, max
#define SIZE(min, max) CLI_SIZE, min, max
#define ANY CLI_NO_LIMIT
#define GIB 0x1p30

const struct cli_option cli_global_options[] = {
    {"help", 'h', NULL, "Show help."},
    {"version", 'V', NULL, "Show the version; with -v, also the features of this build."},
    {"quiet", 'q', NULL, "Print only errors."},
    {"verbose", 'v', NULL, "Print more; twice for debugging."},
    {"color", 0, "WHEN", "Colour: auto, always, never."},
    {"no-progress", 0, NULL, "No progress lines."},
    {"log-format", 0, "FORMAT", "Log lines as text or json."},
    {"no-input", 0, NULL, "Accepted for scripts; no command ever asks."},
    END};

static const struct cli_option run_options[] = {
    SET,
    {"resume", 0, "=WHICH", "Continue from the newest good checkpoint (auto), or from a folder."},
    {"force", 0, NULL, "Start over: earlier checkpoints are removed once there is a new one. With --resume: continue despite other settings."},
    {"out", 0, "DIR", "Output folder, instead of checkpoint.dir."},
    {"max-steps", 0, "N", "Stop after N steps of this run.", WHOLE(1, ANY)},
    {"no-save", 0, NULL, "Save nothing at the end: for benchmarks."},
    {"trace", 0, "FILE", "Write a trace of the third step, for Perfetto."},
    {"rates", 0, "FILE", "Between steps, also time a step's operations into FILE: for benchmarks. Needs 'probe all' first."},
    {"tbw", 0, "SIZE", "Rated endurance of a drive of nvme_paths, such as 600TB, if SMART does not report it.", SIZE(1, ANY)},
    {"dry-run", 0, NULL, "Show the plan and the memory table, then stop."},
    END};
static const struct cli_option plan_options[] = {
    SET,
    {"model", 0, "PATH", "A config.json, a model folder, or a name: Qwen3-32B (configs/models); instead of model.path."},
    {"machine", 0, "FILE|NAME", "Plan for this machine (rtx4090, h100, ...) instead of the one at hand."},
    {"list", 0, NULL, "List the machines and the models that are known by name, and plan nothing."},
    {"prices", 0, NULL, "With --machine: list the rates that plans take times from, each with its source, and plan nothing."},
    {"gpu-mem", 0, "SIZE", "With --machine: its device memory, such as 24GiB."},
    {"host-mem", 0, "SIZE", "With --machine: its host memory, such as 256GiB."},
    {"pcie", 0, "RATE", "With --machine: its link, such as 25GB/s."},
    {"link-share", 0, "N", "With --machine: so many GPUs are behind one such link, as behind a switch.", WHOLE(1, 8)},
    {"nvme", 0, "RATE", "With --machine: read rate of one drive, such as 7GB/s."},
    {"drives", 0, "N", "With --machine: drives to stripe over.", WHOLE(1, 1024)},
    {"seq-len", 0, "N", "Shorthand of --set data.seq_len=N."},
    {"tokens-per-step", 0, "N", "Shorthand of --set train.tokens_per_step=N (64Ki)."},
    {"micro-batch", 0, "N", "Shorthand of --set train.micro_batch=N."},
    {"gpus", 0, "N", "Shorthand of --set device.gpus=N: so many GPUs, each with the machine's memory and link."},
    {"hosts", 0, "N", "So many machines share the step (megatrain help hosts), with equal GPUs.", WHOLE(1, 8)},
    {"net", 0, "RATE", "With --hosts: their network, such as 25Gb/s; else as probe net has measured it, or 10Gb/s."},
    {"optimizers", 0, NULL, "Compare optimizers and orders of updates for this model and machine: a row each."},
    {"score", 0, "K", "Plan megatrain score --top K instead of training; 0: without --top.", WHOLE(0, 1024)},
    {"generate", 0, "N", "Plan generation of texts of N tokens (and a policy's round), by the number of texts at once.", WHOLE(2, 1 << 20)},
    {"trace", 0, "FILE", "Also write the step, as it was simulated, for Perfetto."},
    {"measure", 0, NULL, "First time this configuration's operations on this machine and keep the times; cuda: and the fastest algorithms."},
    JSON,
    END};
static const struct cli_option bench_options[] = {
    {"out", 0, "DIR", "Folder for results (default: SWEEP.bench beside the sweep file)."},
    {"resume", 0, NULL, "Continue; finished runs are kept."},
    {"force", 0, NULL, "Start over; earlier results are removed."},
    {"only", 0, "GLOB", "Only jobs whose name or values match."},
    {"predict-only", 0, NULL, "Predict every job and run none."},
    {"machine", 0, "FILE|NAME", "With --predict-only: predict for this machine."},
    {"measure", 0, NULL, "Measure the machine before and during each run, and predict with those rates."},
    {"compare", 0, NULL, "Compare two result folders: print what changed beyond the noise."},
    {"export-csv", 0, "FILE", "Also write the table to FILE."},
    {"export-json", 0, "FILE", "Also write the table to FILE."},
    {"export-markdown", 0, "FILE", "Also write the table to FILE."},
    END};
static const struct cli_option report_options[] = {
    {"html", 0, "FILE", "The page to write (default: report.html in the first folder)."},
    {"svg", 0, "DIR", "Also write each picture to a file in DIR; needs Node.js."},
    {"watch", 0, "SECONDS", "Write the page again and again, until interrupted; a browser that shows it loads it each time.", WHOLE(1, 86400)},
    END};
static const struct cli_option check_options[] = {
    SET,
    {"adapter", 0, "DIR", "Also check that the adapters of this PEFT folder fit the model, and that it is the one of their checkpoint: reads all of it."},
    END};
static const struct cli_option data_options[] = {
    SET,
    {"samples", 0, "N", "show: number of samples (3).", WHOLE(0, ANY)},
    {"first", 0, "I", "show: the first sample (0).", WHOLE(0, ANY)},
    {"html", 0, "FILE", "show: write a page instead."},
    JSON,
    END};
static const struct cli_option eval_options[] = {
    SET,
    {"model", 0, "DIR", "Evaluate this model instead of model.path."},
    {"adapter", 0, "DIR", "Use the adapters of this PEFT folder, such as a checkpoint."},
    {"per-sample", 0, NULL, "Print the loss of every sample."},
    JSON,
    END};
static const struct cli_option score_options[] = {
    SET,
    {"model", 0, "DIR", "Score with this model instead of model.path."},
    {"adapter", 0, "DIR", "Use the adapters of this PEFT folder, such as a checkpoint."},
    {"data", 0, "FILE", "The samples, instead of data.eval; also requests of lm-evaluation-harness (its --log_samples)."},
    {"out", 0, "FILE", "The results, a JSON object a line. What is done so far is kept in FILE.part, from which another call goes on."},
    {"tokens", 0, NULL, "Also the log-probability of every token."},
    {"choices", 0, NULL, "Also which of neighbouring samples with the same prompt, or of a line of requests, is the likeliest, by sum (best) and by token (best_mean)."},
    {"top", 0, "K", "Also FILE.top: the K likeliest tokens of each trained one, for a student to learn from (distill.teacher).",
     WHOLE(1, 1024)},
    {"dry-run", 0, NULL, "Show the memory table and the size of FILE.top, then stop."},
    {"force", 0, NULL, "Start over, instead of going on from FILE.part."},
    END};
/* What both generate and sample have. */
#define GENERATION                                                                                                     \
    {"chat", 0, NULL, "Put a prompt that is text into the model's chat template, as the user's turn." CHAT_MORE},      \
    {"template", 0, "NAME|FILE", "Instead of the model's chat template, as data.template (chatml, llama3 ...)."},      \
    {"stop", 0, "TEXT", "End before this text; may be repeated."},                                                     \
    {"max-tokens", 0, "N", "Tokens to generate (128).", WHOLE(0, 1 << 24)},                                            \
    {"top-k", 0, "K", "Draw from the K likeliest tokens alone; 0 (default): from all.", WHOLE(0, 1 << 24)},            \
    {"top-p", 0, "P", "Draw from the fewest tokens, of these, whose probability is at least P (1: all).", REAL(0, 1)}, \
    {"min-p", 0, "P", "Draw from the tokens, of these, that are at least P times as probable as the likeliest (0: all).", REAL(0, 1)}, \
    {"guesses", 0, "N", "Tokens that a pass tries beyond a text's next, as they stood behind the same ones before (15); 0: none.", WHOLE(0, 63)}, \
    {"seed", 0, "S", "Seed of the random numbers (0).", WHOLE(0, ANY)}
#define CHAT_MORE ""
static const struct cli_option generate_options[] = {
    SET,
    {"model", 0, "DIR", "Generate with this model instead of model.path."},
    {"adapter", 0, "DIR", "Use the adapters of this PEFT folder, such as a checkpoint."},
    {"prompts", 0, "FILE", "JSON lines: {\"prompt\": TEXT}, {\"messages\": [...]} or {\"prompt_ids\": [...]}; -: standard input."},
    {"out", 0, "FILE", "The results, a JSON object a line, in the prompts' order (standard output)."},
    {"samples", 0, "N", "Texts of each prompt (1).", WHOLE(1, 1 << 16)},
    {"batch", 0, "N", "Texts that share a pass through the weights (as many as are fastest by the plan).", WHOLE(1, 1 << 16)},
    {"temperature", 0, "T", "Sampling temperature (1, or policy.temperature of such a configuration); 0 takes the likeliest token.", REAL(0, 100)},
    GENERATION,
    {"noise", 0, "STEP", "With optimizer.type = mezo: the texts once by each variant of that step's weights, plus and less each noise.", WHOLE(0, ANY)},
    {"dry-run", 0, NULL, "Show the memory table, then stop."},
    END};
#undef CHAT_MORE
#define CHAT_MORE " Without one, on a terminal: a conversation, a turn a line."
static const struct cli_option sample_options[] = {
    {"model", 0, "DIR", "Model folder, or an adapter's folder, which names its model."},
    {"adapter", 0, "DIR", "Use the adapters of this PEFT folder."},
    {"prompt", 0, "TEXT", "Text to continue; -: standard input, to its end."},
    {"prompts", 0, "FILE", "Continue each of a file's JSON lines, {\"prompt\": TEXT} or {\"messages\": [...]}; -: standard input."},
    {"batch", 0, "N", "Prompts of the file that share a pass through the weights (as of generate).", WHOLE(1, 1 << 16)},
    {"context", 0, "N", "Of a conversation: tokens that it and an answer may have (2048); its first turns are then forgotten.", WHOLE(1, 1 << 24)},
    {"temperature", 0, "T", "Sampling temperature (0.8); 0 takes the likeliest token.", REAL(0, 100)},
    GENERATION,
    END};
static const struct cli_option json_options[] = {JSON, END};
static const struct cli_option probe_options[] = {
    {"size", 0, "SIZE", "disk: size of the scratch file (1GiB).", SIZE(4096, ANY)},
    {"request", 0, "SIZE", "disk: size of a request to the kernel (1MiB).", SIZE(4096, GIB)},
    {"depth", 0, "N", "disk: requests in flight in each direction (32).", WHOLE(1, 4096)},
    {"seconds", 0, "S", "disk: shortest time of each measurement (3).", REAL(0, 3600)},
    {"io", 0, "HOW", "disk: io_uring or threads (default: io_uring if it is allowed)."},
    {"dir", 0, "DIR", "all: also measure the drive that this folder is on."},
    {"brief", 0, NULL, "all: only rates; plan --measure times the operations that it needs."},
    {"force", 0, NULL, "all: keep what was measured though other work took the cores."},
    {"threads", 0, "N", "all: measure for this many threads (default: the number of cores).", WHOLE(1, 4096)},
    {"device", 0, "KIND", "all, gemm: cpu, cuda, or auto: the GPU if there is one (auto)."},
    {"index", 0, "N", "all, gemm: which GPU (0).", WHOLE(0, 1024)},
    JSON,
    END};
static const struct cli_option stop_options[] = {
    {"wait", 0, "S", "Wait at most so many seconds; the request stays (default: until the run has ended).", WHOLE(1, ANY)},
    END};
static const struct cli_option inspect_options[] = {
    JSON,
    {"adapter", 0, "DIR", "The adapters of this PEFT folder; with a model, also whether they are for it."},
    {"layer", 0, "N", "What layer N computes, an operation a line: shapes, bytes, FLOP, tensors. Of a folder, a config.json, or a "
                      "published model's name.", WHOLE(0, ANY)},
    END};
static const struct cli_option export_options[] = {
    {"dtype", 0, "TYPE", "bf16 (default), or f32 from the master weights. Adapters are always f32. With --quantize: of what is not packed."},
    {"quantize", 0, "FORMAT", "Pack the layers' matrices, as transformers and vLLM read them: nf4 (bitsandbytes, dense models; transformers alone), "
                            "fp8 (blocks of 128x128), int4, mxfp4 or nvfp4 (compressed-tensors); of gpt-oss the experts: mxfp4."},
    {"eval", 0, "CONFIG.ini", "Then print the loss on its evaluation data, before and after."},
    {"fold-scales", 0, NULL, "Of adapters: one rank and a scale of 1 for all modules, for programs that read no rank_pattern and "
                             "alpha_pattern (vLLM). Scales go into lora_B, smaller ranks get zeros."},
    {"merge", 0, NULL, "Write the whole model, with the adapters added to its weights."},
    {"model", 0, "DIR", "With --merge: the model, instead of the one that the adapters name."},
    {"shard-size", 0, "SIZE", "Largest file (5GB)."},
    END};
static const struct cli_option config_options[] = {
    SET,
    {"markdown", 0, NULL, "keys: print tables in Markdown."},
    {"task", 0, "TASK", "init: sft, lora, qlora, dpo, pretrain or blocks; without it the one that --data is for."},
    {"model", 0, "DIR", "init: the model: its template, and whether it fits this machine."},
    {"data", 0, "FILE", "init: the training data: length of rows, tokens of a step, epochs."},
    {"all", 0, NULL, "init: every key, with its meaning, instead of a task's."},
    END};
static const struct cli_option help_options[] = {
    {"man", 0, "=ini", "Print the manual page; with =ini, that of configurations, with =cluster, that of several GPUs and machines, with =policy, that of reinforcement learning."}, END};
static const struct cli_option no_options[] = {END};

const struct cli_command cli_commands[] = {
    {"run", "CONFIG.ini...", "Train as the configuration says. Several files train an adapter each, and read their base once.",
     run_options, 1, 64, cli_cmd_run},
    {"plan", "[CONFIG.ini]", "Will it fit, and how long will it take? Needs neither weights nor data.",
     plan_options, 0, 1, cli_cmd_plan},
    {"bench", "SWEEP.ini | --compare DIR DIR", "Predict and measure each configuration of a sweep (examples: configs/sweeps).",
     bench_options, 1, 2, cli_cmd_bench},
    {"report", "DIR...", "Draw a page of charts of runs and sweeps, also after a crash.", report_options, 1, 16,
     cli_cmd_report},
    {"check", "CONFIG.ini", "Read configuration, model and data, and try the output folder, without training.", check_options, 1,
     1, cli_cmd_check},
    {"data", "prepare|show|stats CONFIG.ini",
     "Tokenise the training data, show samples with their trained tokens, or print statistics.", data_options, 2,
     2, cli_cmd_data},
    {"eval", "CONFIG.ini", "Loss, perplexity and token accuracy on the evaluation data.",
     eval_options, 1, 1, cli_cmd_eval},
    {"score", "CONFIG.ini", "Rate given answers: for each sample its log-probability, its tokens, and whether the model would say it.",
     score_options, 1, 1, cli_cmd_score},
    {"generate", "[CONFIG.ini|DIR]", "Continue a file's prompts, with tokens and log-probabilities: rollouts, answers to judge.", generate_options, 0,
     1, cli_cmd_generate},
    {"sample", "[DIR]", "Continue a text, or answer a question, to try a model.", sample_options, 0,
     1, cli_cmd_sample},
    {"setup-data", "", "Install the Python packages that read text, chat templates and Parquet, for this user.",
     no_options, 0, 0, cli_cmd_setup_data},
    {"inspect", "[FILE|DIR]", "Tensors, dtypes and configuration of a model, or of adapters.", inspect_options, 0, 1,
     cli_cmd_inspect},
    {"export", "CHECKPOINT_DIR OUT_DIR", "Write a Hugging Face folder without training state: the model, or adapters (PEFT).", export_options, 2, 2,
     cli_cmd_export},
    {"verify", "DIR", "Check every file of a checkpoint.", no_options, 1, 1, cli_cmd_verify},
    {"stop", "DIR", "End the run that writes to this folder after its step, with a checkpoint, and wait for it.", stop_options, 1, 1,
     cli_cmd_stop},
    {"doctor", "", "Show what this machine has, and what of it can be used; under a launcher what all hosts have.", json_options, 0, 0,
     cli_cmd_doctor},
    {"probe", "[all|copy|gemm|adam|disk [DIR]|net]", "Measure this machine, its GPU, or the network between hosts; what 'all' and 'net' find is kept for plan, run and bench.",
     probe_options, 0, 2, cli_cmd_probe},
    {"config", "init | explain KEY | keys | show CONFIG.ini", "Start a configuration for a task, explain a key or all, show what a file comes to.",
     config_options, 1, 2, cli_cmd_config},
    {"completion", "bash|zsh|fish", "Print a shell completion script.", no_options, 1, 1,
     cli_cmd_completion},
    {"help", "[COMMAND|TOPIC]", "Show help.", help_options, 0, 1, cli_cmd_help},
    {NULL, NULL, NULL, NULL, 0, 0, NULL}};

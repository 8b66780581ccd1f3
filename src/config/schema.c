/* SPDX-License-Identifier: Apache-2.0 */
#include "config/schema.h"

#include <string.h>

#include "base/mem.h"

#define AT(field) offsetof(struct mt_config, field)
#define ANY 1, 0

const struct mt_key mt_keys[] = {
    /* clang-format off */
    {"model", "path", MT_NUMERICS, MT_KEY_NAME_OR_PATH, AT(model.path), "", NULL, ANY, NULL,
     "Folder of the model, or its name (org/name) in the Hugging Face cache. Nothing is downloaded."},
    {"model", "init", MT_NUMERICS, MT_KEY_CHOICE, AT(model.init), "weights", "weights|random", ANY, NULL,
     "Start from the model's weights, or from random ones (then only config.json is needed)."},
    {"model", "dtype", MT_NUMERICS, MT_KEY_DTYPE, AT(numerics.dtype), "bf16", "bf16|f32", ANY, NULL,
     "Compute dtype. Master weights are FP32 either way."},
    {"model", "base_dtype", MT_NUMERICS, MT_KEY_CHOICE, AT(model.base_dtype), "auto", MT_PACKED_NAMES, ANY, NULL,
     "Pack what is frozen of the layers' matrices when it is loaded, into 4.1, 4.3 or 8 bits a weight, which changes "
     "results; auto: as the model's files are."},
    {"model", "freeze", MT_NUMERICS, MT_KEY_LIST, AT(model.freeze), "", NULL, ANY, NULL,
     "Globs of tensors that are not trained, such as model.embed_tokens.*"},

    {"adapter", "kind", MT_NUMERICS, MT_KEY_CHOICE, AT(adapter.kind), "none", "none|lora|dora", ANY, NULL,
     "Train low-rank adapters on a frozen model (LoRA, or DoRA: with trained lengths of its rows), or the model itself. "
     "Checkpoints are then PEFT folders."},
    {"adapter", "rank", MT_NUMERICS, MT_KEY_COUNT, AT(adapter.rank), "16", NULL, 1, 4096, NULL,
     "Rank of an adapter: columns of its A x."},
    {"adapter", "alpha", MT_NUMERICS, MT_KEY_REAL, AT(adapter.alpha), "32", NULL, 0, 1e6, NULL,
     "An adapter's product counts alpha / rank times."},
    {"adapter", "targets", MT_NUMERICS, MT_KEY_LIST, AT(adapter.targets), "all-linear", NULL, ANY, NULL,
     "Layers with adapters: names of modules (q_proj, model.layers.3.mlp.up_proj), globs of whole names (*.layers.3.*), or "
     "all-linear: attention, dense and shared MLPs of every layer. Routed experts (all) and lm_head by name alone."},
    {"adapter", "rslora", MT_NUMERICS, MT_KEY_BOOL, AT(adapter.rslora), "off", NULL, ANY, NULL,
     "alpha / sqrt(rank) in the place of alpha / rank."},
    {"adapter", "rank_pattern", MT_NUMERICS, MT_KEY_LIST, AT(adapter.rank_pattern), "", NULL, ANY, NULL,
     "Other ranks, such as q_proj:32, *.layers.3.*:64; names as in targets, the first that matches counts."},
    {"adapter", "alpha_pattern", MT_NUMERICS, MT_KEY_LIST, AT(adapter.alpha_pattern), "", NULL, ANY, NULL,
     "Other alphas, in the same way."},
    {"adapter", "train_also", MT_NUMERICS, MT_KEY_LIST, AT(adapter.train_also), "", NULL, ANY, NULL,
     "Modules that are trained whole beside the adapters, such as lm_head or model.norm (PEFT's modules_to_save)."},
    {"adapter", "lr_ratio_b", MT_NUMERICS, MT_KEY_REAL, AT(adapter.lr_ratio_b), "1", NULL, 0, 1e6, NULL,
     "Learning rate of B over that of A (LoRA+; 16 there)."},
    {"adapter", "dropout", MT_NUMERICS, MT_KEY_REAL, AT(adapter.dropout), "0", NULL, 0, 0.99, NULL,
     "Share of an adapter's input that is dropped in training, by train.seed, step, module, token and column."},
    {"adapter", "path", MT_NUMERICS, MT_KEY_PATH, AT(adapter.path), "", NULL, ANY, NULL,
     "Go on from the adapters of this PEFT folder: rank, alpha and targets are theirs. Empty: begin anew."},

    {"data", "train", MT_NUMERICS, MT_KEY_PATHS, AT(data.train), "", NULL, ANY, NULL,
     "Training files, globs allowed: .jsonl, .json (an array), both also .gz or .zst, .parquet, .arrow; "
     "dataset_info.json#NAME; anything else is plain text. FILE:2 visits its samples twice an epoch."},
    {"data", "eval", MT_NUMERICS, MT_KEY_NAME_OR_FILE, AT(data.eval), "", NULL, ANY, NULL,
     "Evaluation data: a file, a number of samples, or a share (2%) held out by hash."},
    {"data", "format", MT_NUMERICS, MT_KEY_CHOICE, AT(data.format), "auto",
     "auto|messages|sharegpt|alpaca|prompt_completion|text|input_ids", ANY, NULL,
     "Format of samples; auto looks at the first one of each file."},
    {"data", "tokenizer", MT_NUMERICS, MT_KEY_WORD, AT(data.tokenizer), "model", "model|byte", ANY, NULL,
     "The model's own tokenizer.json, or bytes."},
    {"data", "template", MT_NUMERICS, MT_KEY_NAME_OR_FILE, AT(data.template_), "model",
     "model|chatml|llama3|mistral|gemma|qwen3|zephyr|alpaca", ANY, NULL,
     "Chat template: the model's own, a built-in one by name (chatml, llama3, mistral, gemma, qwen3, "
     "zephyr, alpaca), or a .jinja file."},
    {"data", "train_on", MT_NUMERICS, MT_KEY_CHOICE, AT(data.train_on), "assistant", "assistant|last|all", ANY, NULL,
     "Which turns of a conversation are trained: the assistant's, its last, or all. \"train\": true or "
     "false in a message wins."},
    {"data", "seq_len", MT_NUMERICS, MT_KEY_COUNT, AT(numerics.seq_len), "4096", NULL, 2, 1 << 24, NULL,
     "Tokens of a sequence, which is a row of packed samples."},
    {"data", "packing", MT_NUMERICS, MT_KEY_BOOL, AT(data.packing), "on", NULL, ANY, NULL,
     "Put several samples in a row; attention and positions stay within each."},
    {"data", "overlong", MT_NUMERICS, MT_KEY_CHOICE, AT(data.overlong), "error", "error|truncate|drop|split", ANY,
     NULL, "What to do with samples longer than seq_len."},
    {"data", "shuffle", MT_NUMERICS, MT_KEY_BOOL, AT(data.shuffle), "on", NULL, ANY, NULL,
     "Visit rows in another random order each epoch."},
    {"data", "cache_dir", MT_OUTPUT, MT_KEY_PATH, AT(data.cache_dir), "auto", NULL, ANY, NULL,
     "Where token shards are kept; auto is $XDG_CACHE_HOME/megatrain."},

    {"train", "steps", MT_LENGTH, MT_KEY_COUNT, AT(train.steps), "", NULL, 0, 1e15, NULL,
     "Optimizer steps of the run. Set exactly one of steps, epochs, tokens."},
    {"train", "epochs", MT_LENGTH, MT_KEY_REAL, AT(train.epochs), "", NULL, 0, 1e9, NULL,
     "Passes over the data."},
    {"train", "tokens", MT_LENGTH, MT_KEY_COUNT, AT(train.tokens), "", NULL, 0, 1e18, NULL,
     "Tokens to see."},
    {"train", "tokens_per_step", MT_NUMERICS, MT_KEY_COUNT, AT(train.tokens_per_step), "", NULL, 0, 1e12, NULL,
     "Batch size in tokens, a multiple of data.seq_len. Set this or batch_size."},
    {"train", "batch_size", MT_NUMERICS, MT_KEY_COUNT, AT(train.batch_size), "", NULL, 0, 1e9, NULL,
     "Batch size in sequences."},
    {"train", "micro_batch", MT_NUMERICS, MT_KEY_COUNT_AUTO, AT(numerics.micro_batch), "auto", NULL, 1, 1e6, NULL,
     "Sequences on the device at once. Changes the order of sums."},
    {"train", "learning_rate", MT_NUMERICS, MT_KEY_REAL_AUTO, AT(train.learning_rate), "auto", NULL, 0, 1e3, NULL,
     "Peak learning rate; auto is 1e-5, with adapters 2e-4."},
    {"train", "schedule", MT_NUMERICS, MT_KEY_CHOICE, AT(train.schedule), "cosine", "constant|linear|cosine|wsd",
     ANY, NULL, "Learning rate after warm-up."},
    {"train", "warmup", MT_NUMERICS, MT_KEY_AMOUNT, AT(train.warmup), "3%", NULL, 0, 1e15, NULL,
     "Warm-up in steps, or as a share of all steps."},
    {"train", "decay", MT_NUMERICS, MT_KEY_AMOUNT, AT(train.decay), "10%", NULL, 0, 1e15, NULL,
     "wsd: over so many last steps, or such a share of all, the rate falls."},
    {"train", "min_lr_ratio", MT_NUMERICS, MT_KEY_REAL, AT(train.min_lr_ratio), "0.1", NULL, 0, 1, NULL,
     "Lowest learning rate as a share of the peak."},
    {"train", "grad_clip", MT_NUMERICS, MT_KEY_REAL, AT(numerics.grad_clip), "1.0", NULL, 0, 1e30, NULL,
     "Global gradient norm above which gradients are scaled down; 0 = off."},
    {"train", "router_aux_loss", MT_NUMERICS, MT_KEY_REAL, AT(numerics.router_aux_loss), "0", NULL, 0, 1e3, NULL,
     "Mixtures of experts: coefficient of the loss that balances experts, as router_aux_loss_coef in transformers, over "
     "all layers and tokens of a step. What config.json says of it is not used; 0 = off."},
    {"train", "seed", MT_NUMERICS, MT_KEY_COUNT, AT(train.seed), "42", NULL, 0, 9e15, NULL,
     "Seed of all random numbers."},
    {"train", "max_skips", MT_NUMERICS, MT_KEY_COUNT, AT(train.max_skips), "5", NULL, 1, 1e9, NULL,
     "Steps with a gradient that is not finite, in a row, before the run stops."},

    {"optimizer", "type", MT_NUMERICS, MT_KEY_WORD, AT(optimizer.type), "adamw", "adamw", ANY, NULL,
     "w -= lr wd w + lr m / (sqrt(v) + eps), bias-corrected, decay decoupled."},
    {"optimizer", "beta1", MT_NUMERICS, MT_KEY_REAL, AT(numerics.optimizer_keys.beta1), "0.9", NULL, 0, 0.999999, NULL,
     "Decay of the first moment."},
    {"optimizer", "beta2", MT_NUMERICS, MT_KEY_REAL, AT(numerics.optimizer_keys.beta2), "0.999", NULL, 0, 0.9999999, NULL,
     "Decay of the second moment."},
    {"optimizer", "eps", MT_NUMERICS, MT_KEY_REAL, AT(numerics.optimizer_keys.eps), "1e-8", NULL, 0, 1, NULL,
     "Added outside the square root."},
    {"optimizer", "weight_decay", MT_NUMERICS, MT_KEY_REAL, AT(numerics.optimizer_keys.weight_decay), "0.0", NULL, 0, 1e3, NULL,
     "Decoupled weight decay; never for biases and norms."},
    {"optimizer", "decay_embeddings", MT_NUMERICS, MT_KEY_BOOL, AT(numerics.decay_embeddings), "on", NULL, ANY,
     NULL, "Decay embeddings and lm_head too, as transformers does."},
    {"optimizer", "state_dtype", MT_NUMERICS, MT_KEY_DTYPE, AT(numerics.state_dtype), "f32", "bf16|f32", ANY,
     NULL, "Dtype of the optimizer's states. bf16 halves their memory and traffic; each is rounded to the nearest after "
     "every update, so a second moment shrinks as it should only with beta2 of 0.99 or less."},
    {"optimizer", "grad_dtype", MT_NUMERICS, MT_KEY_DTYPE, AT(numerics.grad_dtype), "auto", "auto|bf16|f32", ANY,
     NULL, "Dtype of gradients on their way to the host; auto is the compute dtype."},

    {"memory", "device_budget", MT_MACHINE, MT_KEY_SIZE, AT(placement.device_budget), "auto", NULL, ANY, NULL,
     "Device memory to use, such as 20GiB; auto: what is free of a GPU's but 1 GiB or 4% (1.5 GiB beside a display); on "
     "the cpu device a quarter of the host budget."},
    {"memory", "host_budget", MT_MACHINE, MT_KEY_SIZE, AT(placement.host_budget), "90%", NULL, ANY, NULL,
     "Host memory to use, or a share of what is available."},
    {"memory", "states", MT_PLACEMENT, MT_KEY_CHOICE, AT(placement.states), "auto", MT_STATES_NAMES, ANY,
     "device", "Where master weights and moments live; auto: in host memory, and on the disk where that is "
     "too small and nvme_paths is set."},
    {"memory", "base", MT_PLACEMENT, MT_KEY_CHOICE, AT(placement.base), "auto", MT_BASE_NAMES, ANY, NULL,
     "Where frozen weights live: in host memory, copied to the disk (nvme_paths), or read in place from the model's own "
     "files, of which no copy is made; tensors that are small, or not stored as bf16, then stay in host memory. auto: host "
     "memory, and where that is too small the files, or the disk for what cannot be read in place."},
    {"memory", "base_blocks", MT_PLACEMENT, MT_KEY_COUNT_AUTO, AT(placement.base_blocks), "auto", NULL, 0, 1 << 20, NULL,
     "With base = files: the frozen weights of so many blocks (the embedding, layers, the head), spread evenly, stay in "
     "host memory all the same. auto: none where base = files is set, as many as fit where base = auto chooses it."},
    {"memory", "nvme_paths", MT_MACHINE, MT_KEY_PATHS, AT(memory.nvme_paths), "", NULL, ANY, NULL,
     "Folders on the drives to stripe over; they must exist. What is there is scratch: the truth is the "
     "last checkpoint."},
    {"memory", "nvme_checksums", MT_PLACEMENT, MT_KEY_BOOL, AT(placement.nvme_checksums), "on", NULL, ANY, NULL,
     "Checksums, in host memory, of all that the run has on the drives: a read that returns anything but what was "
     "written stops the run before a checkpoint takes it in."},
    {"memory", "slots", MT_PLACEMENT, MT_KEY_COUNT_AUTO, AT(placement.slots), "auto", NULL, 2, 32767, NULL,
     "Weights of so many layers, or halves of layers, on the device at once; auto is 3, or all where they fit."},
    {"memory", "unit", MT_PLACEMENT, MT_KEY_CHOICE, AT(placement.unit), "auto", MT_UNIT_CUT_NAMES, ANY, NULL,
     "What is on the device at once: a decoder layer, or its attention or MLP half; auto: halves where layers "
     "do not fit, or where the search finds that they are faster."},
    {"memory", "expert_group", MT_PLACEMENT, MT_KEY_COUNT_AUTO, AT(placement.expert_group), "auto", NULL, 1, 1024, NULL,
     "Experts of a mixture on the device at once, as a unit; auto: as many as have 256 MiB in bf16."},
    {"memory", "activations", MT_PLACEMENT, MT_KEY_CHOICE, AT(placement.activations), "auto",
     MT_ACTIVATIONS_NAMES, ANY, NULL,
     "What backward needs: kept on the device, sent to the host, from there to the disk as far as the host "
     "budget is short, or made again."},
    {"memory", "keep_layers", MT_PLACEMENT, MT_KEY_COUNT_AUTO, AT(placement.keep_layers), "auto", NULL, 0, 1024, NULL,
     "With activations = recompute: so many of the last layers keep theirs on the device."},
    {"memory", "offload_layers", MT_PLACEMENT, MT_KEY_COUNT_AUTO, AT(placement.offload_layers), "auto", NULL, 0, 1024,
     NULL, "With activations = recompute: as many as so many other layers have, spread evenly, go to the host."},
    {"memory", "offload_attention", MT_PLACEMENT, MT_KEY_COUNT_AUTO, AT(placement.offload_attention), "auto", NULL, 0, 1024,
     NULL, "With activations = recompute: another number than offload_layers for those of attention; 0: they are made again "
     "while those of the MLP go to the host. auto: the search's, or as offload_layers."},
    {"memory", "schedule", MT_NUMERICS, MT_KEY_CHOICE, AT(numerics.schedule), "layered", MT_STEP_ORDER_NAMES, ANY,
     NULL, "Layered: all micro-batches pass a layer before the next is loaded."},
    {"memory", "logits_chunk", MT_NUMERICS, MT_KEY_COUNT_AUTO, AT(numerics.logits_chunk), "auto", NULL, 64, 1 << 24,
     NULL, "Rows that share a product of the output matrix's gradient, a multiple of 64. Changes the order of sums."},
    {"memory", "logits_piece", MT_NUMERICS, MT_KEY_COUNT_AUTO, AT(numerics.logits_piece), "auto", NULL, 64, 1 << 24,
     NULL, "Rows of FP32 logits at once, of a chunk: the rest of it is there as gradients of half the size (bf16). Auto: 512 "
     "where logits_chunk is auto and larger, else the whole chunk."},
    {"memory", "pin", MT_PLACEMENT, MT_KEY_CHOICE, AT(placement.pin), "auto", MT_PIN_NAMES, ANY, NULL,
     "Host memory that a GPU copies from and to directly: all of it, which auto is, or a small staging ring alone, which "
     "copies then pass through: slower, for systems that lend little locked memory."},

    {"eval", "every", MT_OUTPUT, MT_KEY_COUNT, AT(eval.every), "200", NULL, 0, 1e15, NULL,
     "Steps between evaluations; 0 = only at the end."},
    {"eval", "max_samples", MT_OUTPUT, MT_KEY_COUNT, AT(eval.max_samples), "512", NULL, 1, 1e15, NULL,
     "Samples of an evaluation at most."},
    {"eval", "at_start", MT_OUTPUT, MT_KEY_BOOL, AT(eval.at_start), "on", NULL, ANY, NULL,
     "Evaluate before the first step."},
    {"eval", "early_stop_patience", MT_OUTPUT, MT_KEY_COUNT, AT(eval.early_stop_patience), "0", NULL, 0, 1e9,
     NULL, "Stop after so many evaluations without a better loss; 0 = never."},

    {"checkpoint", "dir", MT_OUTPUT, MT_KEY_PATH, AT(checkpoint.dir), "out", NULL, ANY, NULL,
     "Output folder: checkpoints, metrics, the effective configuration."},
    {"checkpoint", "every", MT_OUTPUT, MT_KEY_INTERVAL, AT(checkpoint.every), "500", NULL, ANY, NULL,
     "Steps, or a duration such as 30m, between checkpoints; 0 = only at the end."},
    {"checkpoint", "keep", MT_OUTPUT, MT_KEY_COUNT, AT(checkpoint.keep), "2", NULL, 1, 1e9, NULL,
     "Newest checkpoints to keep."},
    {"checkpoint", "keep_every", MT_OUTPUT, MT_KEY_COUNT, AT(checkpoint.keep_every), "0", NULL, 0, 1e15, NULL,
     "Also keep those whose step is a multiple of this; 0 = none."},
    {"checkpoint", "keep_best", MT_OUTPUT, MT_KEY_BOOL, AT(checkpoint.keep_best), "on", NULL, ANY, NULL,
     "Also keep the one with the best evaluation loss."},
    {"checkpoint", "save", MT_OUTPUT, MT_KEY_CHOICE, AT(checkpoint.save), "full", "full|weights", ANY, NULL,
     "Weights and training state, or weights alone (cannot be resumed)."},
    {"checkpoint", "frozen", MT_OUTPUT, MT_KEY_CHOICE, AT(checkpoint.frozen), "name", "name|copy", ANY, NULL,
     "Frozen tensors of the model's files in full checkpoints: named, by file and checksum, which resuming verifies and "
     "export completes, or copied."},
    {"checkpoint", "on_signal", MT_OUTPUT, MT_KEY_CHOICE, AT(checkpoint.on_signal), "full",
     "full|weights|none", ANY, NULL, "What to save when stopped by a signal."},
    {"checkpoint", "time_limit", MT_OUTPUT, MT_KEY_DURATION, AT(checkpoint.time_limit), "0", NULL, ANY, NULL,
     "Save and stop with exit code 75 after this long, such as 11h30m; 0 = no limit."},
    {"checkpoint", "save_deadline", MT_OUTPUT, MT_KEY_DURATION, AT(checkpoint.save_deadline), "10m", NULL, ANY, NULL,
     "How long the last save is tried again where it fails, as on a full disk, before weights alone are saved."},
    {"checkpoint", "shard_size", MT_OUTPUT, MT_KEY_BYTES, AT(checkpoint.shard_size), "5GB", NULL, 1e4, 1e15,
     NULL, "Largest file of exported weights."},

    {"log", "every", MT_OUTPUT, MT_KEY_COUNT, AT(log.every), "1", NULL, 1, 1e9, NULL,
     "Steps between progress lines."},
    {"log", "jsonl", MT_OUTPUT, MT_KEY_BOOL, AT(log.jsonl), "on", NULL, ANY, NULL,
     "Write metrics.jsonl to the output folder."},
    {"log", "csv", MT_OUTPUT, MT_KEY_BOOL, AT(log.csv), "off", NULL, ANY, NULL, "Write metrics.csv; of mixtures of experts metrics-layers.csv, too."},
    {"log", "tensorboard", MT_OUTPUT, MT_KEY_BOOL, AT(log.tensorboard), "off", NULL, ANY, NULL,
     "Write TensorBoard events."},
    {"log", "progress", MT_OUTPUT, MT_KEY_CHOICE, AT(log.progress), "auto", "auto|on|off", ANY, NULL,
     "Progress lines on standard error."},

    {"device", "kind", MT_MACHINE, MT_KEY_CHOICE, AT(device.kind), "auto", "auto|cuda|cpu", ANY, NULL,
     "Compute device; auto is a GPU where there is one that this build can use."},
    {"device", "index", MT_MACHINE, MT_KEY_COUNT, AT(device.index), "0", NULL, 0, 1024, NULL, "Which GPU."},
    {"device", "link_gbps", MT_MACHINE, MT_KEY_REAL, AT(device.link_gbps), "0", NULL, 0, 1e6, NULL,
     "cpu device: throttle copies to so many GB/s each way, to rehearse a PCIe link; 0 = off."},
    {"device", "cpu_threads", MT_MACHINE, MT_KEY_COUNT_AUTO, AT(placement.threads), "auto", NULL, 1, 4096, NULL,
     "Threads of compute and of the optimizer; auto is one a core that may be used."},
    {"device", "numa", MT_MACHINE, MT_KEY_WORD, AT(device.numa), "auto", "auto|system", ANY, NULL,
     "Where host memory lies on a machine of several NUMA nodes: auto spreads it over all, so that the optimizer and "
     "copies have the memory channels of all, unless numactl says otherwise; system leaves it to the system."},
    /* clang-format on */
};
const size_t mt_n_keys = MT_ARRAY_LEN(mt_keys);

const struct mt_key *mt_key_find(const char *section, const char *name)
{
    for (size_t i = 0; i < mt_n_keys; i++)
        if (!strcmp(mt_keys[i].section, section) && !strcmp(mt_keys[i].name, name))
            return &mt_keys[i];
    return NULL;
}

const char *mt_key_suggest(const char *section, const char *name)
{
    const char *best = NULL;
    int least = 4; /* more edits than that is another word */
    for (size_t i = 0; i < mt_n_keys; i++) {
        if (section && strcmp(mt_keys[i].section, section))
            continue;
        const char *word = section ? mt_keys[i].name : mt_keys[i].section;
        int d = mt_edit_distance(word, name);
        if (d < least && d < (int)strlen(word)) {
            least = d;
            best = word;
        }
    }
    return best;
}

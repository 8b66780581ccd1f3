/* SPDX-License-Identifier: Apache-2.0 */
#include "config/synonyms.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "base/mem.h"
#include "config/schema.h"

static const struct {
    const char *theirs, *here; /* here: a key, perhaps with its value */
} synonyms[] = {
    {"lr", "train.learning_rate"},
    {"num_train_epochs", "train.epochs"},
    {"num_epochs", "train.epochs"},
    {"max_steps", "train.steps"},
    {"per_device_train_batch_size", "train.micro_batch (train.batch_size is the rows of a step)"},
    {"micro_batch_size", "train.micro_batch"},
    {"train_batch_size", "train.batch_size"},
    {"gradient_accumulation_steps", "train.batch_size, the rows of a step; how many at a time is train.micro_batch"},
    {"lr_scheduler_type", "train.schedule"},
    {"lr_scheduler", "train.schedule"},
    {"warmup_ratio", "train.warmup (a share is 3%)"},
    {"warmup_steps", "train.warmup"},
    {"max_grad_norm", "train.grad_clip"},
    {"gradient_clipping", "train.grad_clip"},
    {"adam_beta1", "optimizer.beta1"},
    {"adam_beta2", "optimizer.beta2"},
    {"adam_epsilon", "optimizer.eps"},
    {"optim", "optimizer.type"},
    {"router_aux_loss_coef", "train.router_aux_loss"},
    {"max_seq_length", "data.seq_len"},
    {"max_length", "data.seq_len"},
    {"sequence_len", "data.seq_len"},
    {"cutoff_len", "data.seq_len"},
    {"sample_packing", "data.packing"},
    {"chat_template", "data.template"},
    {"datasets", "data.train"},
    {"dataset", "data.train"},
    {"field_instruction", "data.columns (instruction:question, output:answer)"},
    {"dataset_text_field", "data.columns (text:content)"},
    {"max_train_samples", "data.max_samples"},
    {"max_eval_samples", "eval.max_samples"},
    {"val_set_size", "data.eval (a share is 5%)"},
    {"model_name_or_path", "model.path"},
    {"base_model", "model.path"},
    {"load_in_4bit", "model.base_dtype = nf4"},
    {"torch_dtype", "model.dtype"},
    {"bf16", "model.dtype = bf16, which is the default"},
    {"lora_r", "adapter.rank"},
    {"r", "adapter.rank"},
    {"lora_rank", "adapter.rank"},
    {"lora_alpha", "adapter.alpha"},
    {"lora_dropout", "adapter.dropout"},
    {"target_modules", "adapter.targets"},
    {"lora_target", "adapter.targets"},
    {"modules_to_save", "adapter.train_also"},
    {"use_dora", "adapter.kind = dora"},
    {"use_rslora", "adapter.rslora"},
    {"loraplus_lr_ratio", "adapter.lr_ratio_b"},
    {"gradient_checkpointing", "memory.activations = recompute; auto chooses"},
    {"output_dir", "checkpoint.dir"},
    {"save_steps", "checkpoint.every"},
    {"save_total_limit", "checkpoint.keep"},
    {"load_best_model_at_end", "checkpoint.keep_best, which keeps it as DIR/best"},
    {"early_stopping_patience", "eval.early_stop_patience"},
    {"metric_for_best_model", "eval.best_by"},
    {"eval_steps", "eval.every"},
    {"logging_steps", "log.every"},
};

/* What other trainers have and this one has not. */
static const struct {
    const char *theirs, *what;
} missing[] = {
    {"neftune_noise_alpha", "noise on embeddings (NEFTune) is not supported"},
    {"neftune_alpha", "noise on embeddings (NEFTune) is not supported"},
    {"label_smoothing", "label smoothing is not supported, but of preferences (preference.label_smoothing)"},
    {"label_smoothing_factor", "label smoothing is not supported, but of preferences (preference.label_smoothing)"},
    {"layers_to_transform", "adapters take layers by name: adapter.targets = model.layers.1?.*.q_proj, say"},
    {"init_lora_weights", "PiSSA, OLoRA and LoftQ are not supported: adapters begin as LoRA's"},
    {"num_cycles", "schedules with restarts are not supported (train.schedule)"},
    {"report_to", "runs are written to metrics.jsonl, CSV and TensorBoard, and to a command of yours (log.csv, log.tensorboard, log.exec)"},
    {"wandb", "log.exec gives a command of yours each record, which it can pass on"},
    {"wandb_project", "log.exec gives a command of yours each record, which it can pass on"},
    {"deepspeed", "there is no other engine to configure: [memory] says what is offloaded"},
    {"fsdp", "layers are divided by device.gpus; [memory] says what is offloaded"},
};

static const struct {
    const char *key, *theirs, *here;
} values[] = {
    {"kind", "qlora", "lora, with model.base_dtype = nf4"},
    {"kind", "rslora", "lora, with adapter.rslora = on"},
    {"kind", "full", "none"},
    {"base_dtype", "int8", "fp8, which has 8 bits, too"},
    {"base_dtype", "4bit", "nf4"},
    {"base_dtype", "fp4", "nf4"},
    {"format", "chatml", "messages, with data.template = chatml"},
    {"format", "openai", "messages"},
    {"format", "chat_template", "messages"},
    {"format", "dpo", "preference"},
    {"format", "kto", "rated"},
    {"format", "completion", "text, or prompt_completion"},
    {"format", "instruction", "alpaca"},
};

const char *mt_value_synonym(const char *key, const char *value)
{
    for (size_t i = 0; i < MT_ARRAY_LEN(values); i++)
        if (!strcmp(values[i].key, key) && !strcasecmp(values[i].theirs, value))
            return values[i].here;
    return NULL;
}

const char *mt_key_synonym(const char *name, char *buf, unsigned long len)
{
    const char *here = NULL;
    char other[128];
    for (size_t i = 0; i < MT_ARRAY_LEN(missing); i++)
        if (!strcasecmp(missing[i].theirs, name)) {
            snprintf(buf, len, ": %s", missing[i].what);
            return buf;
        }
    for (size_t i = 0; i < MT_ARRAY_LEN(synonyms) && !here; i++)
        if (!strcasecmp(synonyms[i].theirs, name))
            here = synonyms[i].here;
    size_t n_other = 0; /* sections with a key of that name; "kind" and "steps" mean another thing in each */
    for (size_t i = 0; i < mt_n_keys() && !here; i++)
        if (!strcasecmp(mt_key_at(i)->name, name) && !n_other++)
            snprintf(other, sizeof(other), "%s.%s", mt_key_at(i)->section, mt_key_at(i)->name);
    static const char *const vague[] = {"kind", "type", "steps", "every", "path", "format"};
    for (size_t i = 0; i < MT_ARRAY_LEN(vague); i++)
        n_other += !strcasecmp(vague[i], name) ? 2 : 0;
    if (!here && n_other == 1)
        here = other;
    if (!here)
        return NULL;
    snprintf(buf, len, ": here it is %s", here);
    return buf;
}

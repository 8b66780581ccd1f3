/* SPDX-License-Identifier: Apache-2.0 */
#include "config/synonyms.h"

#include <stdio.h>
#include <string.h>
#include <strings.h>

#include "base/mem.h"
#include "base/units.h"
#include "config/schema.h"

/* Names by bars, of transformers, PEFT, TRL, axolotl, LLaMA-Factory and unsloth. */
static const struct {
    const char *theirs, *here; /* here: a key, perhaps with its value */
} synonyms[] = {
    {"lr", "train.learning_rate"},
    {"num_train_epochs|num_epochs", "train.epochs"},
    {"max_steps", "train.steps"},
    {"per_device_train_batch_size", "train.micro_batch (train.batch_size is the rows of a step)"},
    {"micro_batch_size", "train.micro_batch"},
    {"auto_find_batch_size", "train.micro_batch = auto, which is the default"},
    {"per_device_eval_batch_size|eval_batch_size", "train.micro_batch, of evaluations, too"},
    {"train_batch_size", "train.batch_size"},
    {"gradient_accumulation_steps|gradient_accumulation|grad_accum", "train.batch_size, the rows of a step; how many at a time is train.micro_batch"},
    {"lr_scheduler_type|lr_scheduler|scheduler", "train.schedule"},
    {"lr_scheduler_kwargs|cosine_min_lr_ratio|min_lr|min_lr_rate", "train.min_lr_ratio, a share of the peak"},
    {"warmup_ratio", "train.warmup (a share is 3%)"},
    {"warmup_steps", "train.warmup"},
    {"max_grad_norm|gradient_clipping", "train.grad_clip"},
    {"adam_beta1", "optimizer.beta1"},
    {"adam_beta2", "optimizer.beta2"},
    {"adam_epsilon", "optimizer.eps"},
    {"optim", "optimizer.type"},
    {"use_galore", "optimizer.type = galore"},
    {"use_apollo", "optimizer.type = apollo"},
    {"galore_rank|apollo_rank", "optimizer.rank"},
    {"galore_update_interval|apollo_update_interval|update_proj_gap", "optimizer.projection_gap"},
    {"galore_target|apollo_target|optim_target_modules", "optimizer.matrices"},
    {"use_badam|badam_mode|lisa_n_layers", "train.blocks = layers"},
    {"badam_switch_interval|lisa_step_interval", "train.block_steps"},
    {"badam_switch_mode", "train.block_order"},
    {"router_aux_loss_coef", "train.router_aux_loss"},
    {"random_state|data_seed", "train.seed, of the order of data, too"},
    {"freeze_trainable_layers|freeze_trainable_modules|unfrozen_parameters", "model.freeze, globs of what is not trained"},
    {"max_seq_length|max_seq_len|max_length|model_max_length|sequence_len|cutoff_len|block_size", "data.seq_len"},
    {"sample_packing|neat_packing|packing_strategy|padding_free|pad_to_sequence_len|group_by_length|eval_sample_packing", "data.packing"},
    {"excess_length_strategy|truncation|max_prompt_length", "data.overlong"},
    {"chat_template|chat_template_jinja|chat_template_path|tool_format", "data.template"},
    {"datasets|dataset|dataset_name|dataset_dir", "data.train"},
    {"mix_strategy|interleave_probs|dataset_weights", "data.train = a.jsonl:2, b.jsonl, which has the samples of a twice an epoch"},
    {"field_instruction", "data.columns (instruction:question, output:answer)"},
    {"field_messages", "data.columns (messages:dialog)"},
    {"dataset_text_field", "data.columns (text:content)"},
    {"max_train_samples", "data.max_samples"},
    {"max_eval_samples", "eval.max_samples"},
    {"val_set_size|val_size|validation_split|test_size", "data.eval (a share is 5%)"},
    {"eval_dataset|test_datasets", "data.eval; more of them are eval.sets"},
    {"dataset_prepared_path|tokenized_path|overwrite_cache|streaming", "data.cache_dir, which keeps the tokens of each file as it was"},
    {"train_on_inputs|train_on_prompt|roles_to_train|train_on_responses_only|assistant_only_loss|completion_only_loss",
     "data.train_on = assistant, which is the default; a completion alone is trained, without its prompt"},
    {"mask_history", "data.train_on = last"},
    {"model_name_or_path|base_model|model_name|model_id", "model.path"},
    {"load_in_4bit|bnb_4bit_quant_type", "model.base_dtype = nf4"},
    {"double_quantization|bnb_4bit_use_double_quant", "model.base_dtype = nf4, which has it"},
    {"load_in_8bit", "model.base_dtype = fp8, which has 8 bits, too"},
    {"quantization_bit|quantization_method", "model.base_dtype"},
    {"torch_dtype|precision|mixed_precision|bnb_4bit_compute_dtype", "model.dtype"},
    {"bf16", "model.dtype = bf16, which is the default"},
    {"finetuning_type|full_finetuning", "adapter.kind; none trains all parameters"},
    {"lora_r|r|lora_rank", "adapter.rank"},
    {"lora_alpha", "adapter.alpha"},
    {"lora_dropout", "adapter.dropout"},
    {"target_modules|lora_target|lora_target_modules|exclude_modules", "adapter.targets, names by commas; all of LLaMA-Factory is all-linear"},
    {"lora_target_linear", "adapter.targets = all-linear, which is the default"},
    {"target_parameters", "adapter.targets, of experts experts.gate_up_proj, experts.down_proj"},
    {"lora_layers_to_transform|layers_to_transform", "adapter.targets by whole names: model.layers.1?.*.q_proj, say"},
    {"modules_to_save|lora_modules_to_save|additional_target", "adapter.train_also"},
    {"use_dora|peft_use_dora", "adapter.kind = dora"},
    {"use_rslora|peft_use_rslora", "adapter.rslora"},
    {"loraplus_lr_ratio", "adapter.lr_ratio_b"},
    {"adapter_name_or_path|lora_model_dir", "adapter.path"},
    {"relora_steps|relora", "adapter.merge_every"},
    {"relora_warmup_steps", "adapter.merge_warmup"},
    {"gradient_checkpointing|gradient_checkpointing_kwargs|use_gradient_checkpointing", "memory.activations = recompute; auto chooses"},
    {"activation_offloading", "memory.activations = offload; auto chooses"},
    {"output_dir|run_name|logging_dir", "checkpoint.dir"},
    {"save_steps", "checkpoint.every"},
    {"save_strategy|saves_per_epoch", "checkpoint.every, in steps or time; a run's start prints the steps of a pass over the data"},
    {"save_total_limit", "checkpoint.keep"},
    {"save_only_model", "checkpoint.save = weights"},
    {"load_best_model_at_end", "checkpoint.keep_best, which keeps it as DIR/best"},
    {"early_stopping|early_stopping_patience", "eval.early_stop_patience"},
    {"metric_for_best_model|greater_is_better", "eval.best_by"},
    {"eval_steps", "eval.every"},
    {"eval_strategy|evals_per_epoch", "eval.every, in steps; a run's start prints the steps of a pass over the data"},
    {"eval_on_start", "eval.at_start, which is the default"},
    {"logging_steps|logging_first_step", "log.every"},
    {"rl|stage|trainer", "preference.loss (DPO, KTO, ORPO ...) or policy.loss (GRPO ...); without them the data are learned as they are"},
    {"loss_type|pref_loss", "preference.loss, or policy.loss of rollouts"},
    {"pref_beta", "preference.beta"},
    {"kl_coef", "policy.kl_weight"},
    {"pref_ftx|rpo_alpha|cpo_alpha", "preference.sft"},
    {"dpo_label_smoothing", "preference.label_smoothing"},
    {"simpo_gamma", "preference.gamma"},
    {"kto_chosen_weight", "preference.desirable_weight"},
    {"kto_rejected_weight", "preference.undesirable_weight"},
    {"ref_model|precompute_ref_log_probs", "preference.reference; its log-probabilities are computed before the first step"},
    {"reference_free", "preference.loss = simpo, cpo or orpo, which have no reference"},
    {"num_generations", "policy.samples"},
    {"max_completion_length", "policy.max_tokens"},
    {"max_new_tokens", "eval.generate_tokens; of policies policy.max_tokens"},
    {"reward_funcs|reward_weights", "policy.reward, a check by its name, or one command of yours"},
    {"epsilon|cliprange", "policy.clip_low and policy.clip_high"},
    {"epsilon_high", "policy.clip_high"},
    {"scale_rewards", "policy.scale"},
    {"num_iterations|steps_per_generation", "policy.steps_per_round"},
    {"generation_batch_size", "policy.prompts_per_round, each with policy.samples"},
    {"importance_sampling_level", "policy.loss = gspo, which has one ratio a rollout"},
    {"mask_truncated_completions", "policy.truncated = mask"},
    {"use_vllm|vllm_mode", "policy.rollouts: generate, or a command that asks a server"},
};

/* What other trainers have and this one has not, or does without being told. */
static const struct {
    const char *theirs, *what;
} missing[] = {
    {"neftune_noise_alpha|neftune_alpha|noisy_embedding_alpha", "noise on embeddings (NEFTune) is not supported"},
    {"label_smoothing|label_smoothing_factor", "label smoothing is not supported, but of preferences (preference.label_smoothing)"},
    {"init_lora_weights|pissa_init|loftq_config", "PiSSA, OLoRA and LoftQ are not supported: adapters begin as LoRA's"},
    {"bias|lora_bias", "biases get no adapters; adapter.train_also trains whole modules"},
    {"loraplus_lr_embedding|embedding_learning_rate", "all that is trained has one learning rate, but B of adapters (adapter.lr_ratio_b)"},
    {"num_cycles", "schedules with restarts are not supported (train.schedule)"},
    {"early_stopping_threshold", "any improvement counts (eval.early_stop_patience)"},
    {"sync_ref_model", "a reference stays as it is for a run (preference.reference)"},
    {"report_to", "runs are written to metrics.jsonl, CSV and TensorBoard, and to a command of yours (log.csv, log.tensorboard, log.exec)"},
    {"wandb|use_wandb|wandb_project|wandb_name", "log.exec gives a command of yours each record, which it can pass on"},
    {"plot_loss", "megatrain report draws a run's charts"},
    {"push_to_hub|hub_model_id", "hf upload sends a folder that megatrain export has written"},
    {"deepspeed|cpu_offload", "there is no other engine to configure: [memory] says what is offloaded"},
    {"fsdp|fsdp_config", "layers are divided by device.gpus; [memory] says what is offloaded"},
    {"fp16", "there is no FP16: model.dtype is bf16 or f32"},
    {"tf32", "there is no TF32: model.dtype = f32 computes in FP32 throughout"},
    {"flash_attention|flash_attn|xformers_attention|sdp_attention|attn_implementation|enable_liger_kernel|use_liger_kernel|use_unsloth|"
     "torch_compile", "the device's kernels are chosen for it: there is nothing to set"},
    {"train_on_eos", "a trained turn is trained with the token that ends it (data.train_on)"},
    {"top_p|top_k|min_p", "rollouts of a policy are drawn from all tokens; megatrain generate and sample have these as options"},
    {"rope_scaling", "rotary embeddings are as the model's config.json has them"},
    {"model_type|tokenizer_type|trust_remote_code|special_tokens|eos_token|pad_token",
     "the model's folder says what it and its tokenizer are; code in it is never run"},
    {"resume_from_checkpoint", "megatrain run --resume goes on from the newest checkpoint, --resume=DIR from another"},
    {"overwrite_output_dir", "megatrain run --force starts over in a folder that is not empty"},
    {"preprocessing_num_workers|dataset_num_proc|dataset_processes|dataloader_num_workers|num_workers",
     "tokens are made by all cores, once, and kept (data.cache_dir)"},
};

static const struct {
    const char *key, *theirs, *here;
} values[] = {
    {"kind", "qlora", "lora, with model.base_dtype = nf4"},
    {"kind", "rslora", "lora, with adapter.rslora = on"},
    {"kind", "full", "none"},
    {"type", "adamw_torch", "adamw"},
    {"type", "adamw_torch_fused", "adamw"},
    {"type", "adamw_8bit", "adamw, with optimizer.state_dtype = 8bit"},
    {"type", "adamw_bnb_8bit", "adamw, with optimizer.state_dtype = 8bit"},
    {"type", "paged_adamw_8bit", "adamw, with optimizer.state_dtype = 8bit"},
    {"type", "paged_adamw_32bit", "adamw"},
    {"type", "galore_adamw", "galore"},
    {"type", "apollo_adamw", "apollo"},
    {"schedule", "constant_with_warmup", "constant, with train.warmup"},
    {"schedule", "cosine_with_min_lr", "cosine, with train.min_lr_ratio"},
    {"schedule", "warmup_stable_decay", "wsd, with train.decay"},
    {"dtype", "bfloat16", "bf16"},
    {"dtype", "float32", "f32"},
    {"dtype", "fp32", "f32"},
    {"loss", "dpo", "sigmoid"},
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
        if (mt_choice_find_any_case(missing[i].theirs, name) >= 0) {
            snprintf(buf, len, ": %s", missing[i].what);
            return buf;
        }
    for (size_t i = 0; i < MT_ARRAY_LEN(synonyms) && !here; i++)
        if (mt_choice_find_any_case(synonyms[i].theirs, name) >= 0)
            here = synonyms[i].here;
    size_t n_other = 0; /* sections with a key of that name; "kind" and "steps" mean another thing in each */
    for (size_t i = 0; i < mt_n_keys() && !here; i++)
        if (!strcasecmp(mt_key_at(i)->name, name) && !n_other++)
            snprintf(other, sizeof(other), "%s.%s", mt_key_at(i)->section, mt_key_at(i)->name);
    if (!here && n_other == 1 && mt_choice_find_any_case("kind|type|steps|every|path|format", name) < 0)
        here = other;
    if (!here)
        return NULL;
    snprintf(buf, len, ": here it is %s", here);
    return buf;
}

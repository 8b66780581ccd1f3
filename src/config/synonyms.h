/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

/**
 * What another trainer's key (of transformers, PEFT, TRL, axolotl, LLaMA-Factory; without its section) is here: ": here
 * it is train.learning_rate", or that there is no such thing; also a key of this schema that is in another section. NULL:
 * the name is not known. The text is static, or in buf.
 */
const char *mt_key_synonym(const char *name, char *buf, unsigned long len);
/** What a value that another trainer has for such a key is here: "lora, with model.base_dtype = nf4". NULL: it is not known. */
const char *mt_value_synonym(const char *key, const char *value);

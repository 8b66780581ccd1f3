/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "base/err.h"
#include "base/json.h"
#include "config/config.h"

/* data.columns: what records call the fields of a format, "FIELD:COLUMN" each. */

/** MT_ERR_USAGE: an item is not of this form, its field is of no format, or one of its names is there twice. */
int mt_columns_check(const struct mt_cfg_list *columns, struct mt_err *err);
/** Gives each column of the record the name of its field, whose own value is lost; one that is not there is no error.
 * columns: checked, or NULL. */
void mt_columns_rename(cJSON *record, const struct mt_cfg_list *columns);
/** The object {FIELD: COLUMN}, for the data helper. */
cJSON *mt_columns_json(const struct mt_cfg_list *columns);

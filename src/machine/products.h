/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "device/device.h"

/**
 * Which algorithms were fastest for matrix products of a model's shapes (mt_device_tune()), kept in the user's cache in
 * one file for each GPU, version of the library and number of multiprocessors. Results depend on it in bits, so the
 * file is another than the profile, which is one for each number of threads: no placement chooses between files.
 */
/** Reads the file, if there is one, into a device that has not run anything. -EINVAL: it is damaged. */
int mt_products_load(mt_device *dev, struct mt_err *err);
/** Writes the file: the text of the device's choices. */
int mt_products_save(mt_device *dev, const char *text, struct mt_err *err);

/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include "device/device.h"

/**
 * Which of a library's algorithms a device takes for matrix products of a shape: the first that the library names,
 * unless they were timed. Algorithms differ in bits, so the choices are among mt_device_findings(), too, whose adoption
 * replaces them. Call from the thread that feeds COMPUTE, before the first operation.
 */

/** What choices hold for: "NVIDIA H100, cuBLASLt 13.1.0, sm_90, 132 multiprocessors"; "": the device has none. */
void mt_device_products_of(mt_device *dev, char *buf, size_t len);
/** While `on`, a product of a shape without a choice is repeated by all algorithms in turn, so that what it adds to has
 * no meaning, and the fastest is chosen. */
void mt_device_tune(mt_device *dev, bool on);
/** Prints the choices ("": none; out NULL: not at all), and returns how many there are. */
size_t mt_device_products(mt_device *dev, struct mt_str *out);
/** Takes the text's choices in place of those there are; false: it is invalid, and nothing changes. */
bool mt_device_adopt_products(mt_device *dev, const char *text);

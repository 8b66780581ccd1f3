/* SPDX-License-Identifier: Apache-2.0 */
#pragma once

#include <stdbool.h>

/**
 * What shows that this machine has an NVIDIA GPU, whether the program can use it or not: "/proc/driver/nvidia", the folder
 * of WSL, the driver's library, or nvidia-smi; NULL: nothing does. Starts neither the GPU nor a program if the first two
 * show one. `root`: a folder in the place of /, for tests; "" for the machine.
 */
const char *mt_hw_gpu_shown_by(const char *root);

/** Whether the kernel is that of Windows' subsystem for Linux, where Windows manages the GPU's memory. */
bool mt_hw_on_wsl(void);

/* SPDX-License-Identifier: Apache-2.0 */
/* A library to be found in place of one of CUDA's. */
int mt_found(void);

int mt_found(void)
{
    return 1;
}

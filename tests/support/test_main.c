/* SPDX-License-Identifier: Apache-2.0 */
#include "test.h"

int main(void)
{
    return test_run();
}

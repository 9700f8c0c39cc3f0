/* SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause */
/* Keeps a key in memory that is never shared: cc -I../include secret.c && ./a.out [SOCKET] */
#include "vmm_dedup_hints.h"

#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

int main(int argc, char **argv)
{
    size_t length = 16 * 4096;
    /* Locked, so that it does not go to a swap device. */
    char *key = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    int hints = vmm_dedup_hints_connect(argc > 1 ? argv[1] : NULL);
    int status;

    if (key == MAP_FAILED || hints < 0) {
        perror("secret");
        return 1;
    }
    if (mlock(key, length) < 0)
        perror("mlock");
    /* First the mark, then the secret. */
    memset(key, 0, length);
    status = vmm_dedup_hints_mark(hints, VMM_DEDUP_NEVER, key, length);
    if (status < 0) {
        perror("secret");
        return 1;
    }
    printf("status %d\n", status);
    fflush(stdout);
    memset(key, 'k', length);
    /* The mark ends with this process. */
    getchar();
    return status == VMM_DEDUP_HOLDS || status == VMM_DEDUP_NO_SERVICE ? 0 : 2;
}

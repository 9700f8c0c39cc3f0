/* SPDX-License-Identifier: Apache-2.0 OR BSD-3-Clause */
/*
 * How a program in a guest marks its own memory: worth sharing, never to be shared, soon overwritten.
 *
 * Everything is in this header; there is no library. Marks count for whole pages. They last until they are lifted, until
 * the socket is closed, or until the process that connected ends.
 *
 *     int hints = vmm_dedup_hints_connect(NULL);
 *     if (hints >= 0 && vmm_dedup_hints_mark(hints, VMM_DEDUP_NEVER, key, sizeof key) == VMM_DEDUP_HOLDS)
 *         ... nothing of the key's pages is shared, nor will be
 *
 * A mark follows a page that the guest's kernel moves, but only a second later.
 */
#ifndef VMM_DEDUP_HINTS_H
#define VMM_DEDUP_HINTS_H

#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define VMM_DEDUP_HINTS_SOCKET "/run/vmm-dedup-agent/hints.sock"
#define VMM_DEDUP_HINTS_VERSION 1

enum vmm_dedup_mark {
    VMM_DEDUP_WORTH = 1,   /* worth sharing: probably the same in other VMs, and it stays as it is */
    VMM_DEDUP_NEVER = 2,   /* never to be shared: keys, passwords */
    VMM_DEDUP_SOON = 3,    /* about to be overwritten: not worth a look */
    VMM_DEDUP_NOTHING = 4, /* lifts the others */
};

enum vmm_dedup_status {
    VMM_DEDUP_HOLDS = 0,      /* the mark holds; one that forbids sharing is in force */
    VMM_DEDUP_NO_SERVICE = 1, /* kept, but no service listens: it will hold when one does */
    VMM_DEDUP_RANGE = 2,      /* the range is empty, or not one of this process's */
    VMM_DEDUP_TOO_MUCH = 3,   /* the process has marked as much as it may */
    VMM_DEDUP_RIGHTS = 4,     /* the agent may not see where this memory lies */
    VMM_DEDUP_UNKNOWN = 5,    /* a record that the agent does not know */
};

/* Little-endian, as every machine that this runs on is. */
struct vmm_dedup_request {
    uint16_t version;
    uint16_t mark;
    uint32_t zero;
    uint64_t address;
    uint64_t length;
};

struct vmm_dedup_reply {
    uint16_t version;
    uint16_t status;
    uint32_t zero;
    uint64_t pages;
};

/* Connects to the agent; `path` may be NULL for the usual place. Returns a descriptor, or -1 with errno set. */
static inline int vmm_dedup_hints_connect(const char *path)
{
    struct sockaddr_un address = { .sun_family = AF_UNIX };
    int fd;

    if (!path)
        path = VMM_DEDUP_HINTS_SOCKET;
    if (strlen(path) >= sizeof address.sun_path) {
        errno = ENAMETOOLONG;
        return -1;
    }
    strcpy(address.sun_path, path);
    fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (fd >= 0 && connect(fd, (struct sockaddr *)&address, sizeof address) < 0) {
        int error = errno;
        close(fd);
        errno = error;
        return -1;
    }
    return fd;
}

/* Marks the pages that the memory touches, and waits for the answer. Returns a vmm_dedup_status, or -1 with errno set. */
static inline int vmm_dedup_hints_mark(int fd, enum vmm_dedup_mark mark, const void *memory, size_t length)
{
    struct vmm_dedup_request request = {
        .version = VMM_DEDUP_HINTS_VERSION,
        .mark = (uint16_t)mark,
        .address = (uintptr_t)memory,
        .length = length,
    };
    struct vmm_dedup_reply reply;
    ssize_t done;

    do
        done = send(fd, &request, sizeof request, MSG_NOSIGNAL);
    while (done < 0 && errno == EINTR);
    if (done < 0)
        return -1;
    do
        done = recv(fd, &reply, sizeof reply, 0);
    while (done < 0 && errno == EINTR);
    if (done < 0)
        return -1;
    if (done != sizeof reply || reply.version != VMM_DEDUP_HINTS_VERSION) {
        errno = EPROTO;
        return -1;
    }
    return reply.status;
}

#endif

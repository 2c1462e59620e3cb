/* A transfer engine that copies within the process. The address asked for chooses the fate:
 * 1 is refused at submission, 2 fails, 3 ends only when told so, 4 ends in an unknown state. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

struct request {
    int opcode;
    void *source;
    int32_t target;
    uint64_t offset;
    uint64_t length;
};

struct status {
    int status;
    uint64_t bytes;
};

struct buffer {
    void *address;
    size_t length;
};

struct batch {
    int state[64];
    size_t limit, used;
};

static int batches;

static int told;

int fake_live_batches(void) { return batches; }

int fake_end_all(void) { return told = 1; }

void *createTransferEngine(const char *metadata, const char *name, const char *host, uint64_t port,
                           int discover) {
    if (strcmp(metadata, "P2PHANDSHAKE") || strcmp(name, host) || port || discover) return NULL;
    return malloc(1);
}

void destroyTransferEngine(void *e) { free(e); }

void *installTransport(void *e, const char *protocol, void **args) {
    return args == NULL && strcmp(protocol, "tcp") == 0 ? e : NULL;
}

int getLocalIpAndPort(void *e, char *out, size_t len) {
    (void)e;
    if (len < 16) return -1;
    strcpy(out, "127.0.0.1:15001");
    return 0;
}

int32_t openSegment(void *e, const char *name) {
    (void)e;
    return strcmp(name, "127.0.0.1:15002") == 0 ? 7 : -200;
}

int registerLocalMemoryBatch(void *e, struct buffer *b, size_t n, const char *location) {
    (void)e;
    if (strcmp(location, "*")) return -1;
    for (size_t i = 1; i < n; i++)
        if (b[i].address == b[0].address) return -7;
    return 0;
}

int unregisterLocalMemoryBatch(void *e, void **addresses, size_t n) {
    (void)e;
    return n && addresses[0] ? 0 : -3;
}

uint64_t allocateBatchID(void *e, size_t n) {
    (void)e;
    struct batch *b = calloc(1, sizeof *b);
    b->limit = n;
    batches++;
    return (uint64_t)(uintptr_t)b;
}

int submitTransfer(void *e, uint64_t id, struct request *r, size_t n) {
    (void)e;
    struct batch *b = (struct batch *)(uintptr_t)id;
    if (b->used + n > b->limit || n > 64) return 2;
    for (size_t i = 0; i < n; i++) {
        if (r[i].opcode != 0 || r[i].target != 7) return 1;
        switch (r[i].offset) {
        case 1: return 3;
        case 2: b->state[i] = 6; break;
        case 3: b->state[i] = 1; break;
        case 4: b->state[i] = 42; break;
        default:
            memcpy(r[i].source, (void *)(uintptr_t)r[i].offset, r[i].length);
            b->state[i] = 4;
        }
    }
    b->used += n;
    return 0;
}

int getTransferStatus(void *e, uint64_t id, size_t task, struct status *out) {
    (void)e;
    struct batch *b = (struct batch *)(uintptr_t)id;
    if (task >= b->used) return 1;
    if (told && b->state[task] == 1) b->state[task] = 4;
    out->status = b->state[task];
    out->bytes = 0;
    return 0;
}

int freeBatchID(void *e, uint64_t id) {
    (void)e;
    struct batch *b = (struct batch *)(uintptr_t)id;
    for (size_t i = 0; i < b->used; i++)
        if (b->state[i] < 2) return 4;
    free(b);
    batches--;
    return 0;
}

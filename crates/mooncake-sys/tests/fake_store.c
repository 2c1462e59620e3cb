/* A store of 64 objects behind Mooncake's C interface, for one thread at a time. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

struct config {
    size_t replica_num;
    int soft_pin;
    int hard_pin;
    const char **segments;
    size_t segment_count;
};

struct object {
    char key[128];
    char *value;
    size_t size;
};

struct store {
    struct object objects[64];
    int set_up;
};

static struct object *find(struct store *s, const char *key) {
    for (int i = 0; i < 64; i++)
        if (s->objects[i].value && strcmp(s->objects[i].key, key) == 0) return &s->objects[i];
    return NULL;
}

void *mooncake_store_create(void) { return calloc(1, sizeof(struct store)); }

void mooncake_store_destroy(void *store) {
    struct store *s = store;
    for (int i = 0; i < 64; i++) free(s->objects[i].value);
    free(s);
}

/* Succeeds only if every argument arrives where it belongs. */
int mooncake_store_setup(void *store, const char *host, const char *metadata, uint64_t segment,
                         uint64_t buffer, const char *protocol, const char *device,
                         const char *master) {
    if (strcmp(host, "host-1") || strcmp(metadata, "P2PHANDSHAKE") || segment != 0x1122334455 ||
        buffer != 16 << 20 || strcmp(protocol, "tcp") || strcmp(device, "dev") ||
        strncmp(master, "127.0.0.1:", 10))
        return -600;
    ((struct store *)store)->set_up = 1;
    return 0;
}

int mooncake_store_health_check(void *store) { return ((struct store *)store)->set_up ? 0 : 1; }

int mooncake_store_batch_put_from(void *store, const char **keys, void **buffers,
                                  const size_t *sizes, size_t count, const struct config *config,
                                  int *results) {
    if (config->replica_num != 1 || config->soft_pin || config->hard_pin != 1 ||
        config->segments || config->segment_count)
        return -1;
    for (size_t n = 0; n < count; n++) {
        results[n] = -200;
        if (sizes[n] == 0) results[n] = -600;
        else if (find(store, keys[n])) results[n] = 0;
        else
            for (int i = 0; i < 64; i++) {
                struct object *o = &((struct store *)store)->objects[i];
                if (o->value) continue;
                strncpy(o->key, keys[n], sizeof o->key - 1);
                o->value = malloc(sizes[n]);
                o->size = sizes[n];
                memcpy(o->value, buffers[n], sizes[n]);
                results[n] = 0;
                break;
            }
    }
    return 0;
}

int mooncake_store_batch_get_into(void *store, const char **keys, void **buffers,
                                  const size_t *sizes, size_t count, int64_t *results) {
    for (size_t n = 0; n < count; n++) {
        struct object *o = find(store, keys[n]);
        results[n] = !o ? -704 : o->size > sizes[n] ? -600 : (int64_t)o->size;
        if (results[n] > 0) memcpy(buffers[n], o->value, o->size);
    }
    return 0;
}

int mooncake_store_batch_is_exist(void *store, const char **keys, size_t count, int *results) {
    for (size_t n = 0; n < count; n++) results[n] = find(store, keys[n]) != NULL;
    return 0;
}

int64_t mooncake_store_get_size(void *store, const char *key) {
    struct object *o = find(store, key);
    return o ? (int64_t)o->size : -704;
}

int mooncake_store_get_hostname(void *store, char *out, size_t len) {
    (void)store;
    if (len < 16) return -1;
    strcpy(out, "host-1:15000");
    return 0;
}

int mooncake_store_remove(void *store, const char *key, int force) {
    struct object *o = find(store, key);
    if (!o) return -704;
    if (!force) return -706;
    free(o->value);
    o->value = NULL;
    return 0;
}

int mooncake_store_register_buffer(void *store, void *buffer, size_t size) {
    (void)store;
    return buffer && size ? 0 : -600;
}

int mooncake_store_unregister_buffer(void *store, void *buffer) {
    (void)store;
    (void)buffer;
    return 0;
}

// Records the names by which a program reaches the CUDA driver and NVML: through dlsym, and through
// cuGetProcAddress in both versions.
//
//     cc -O1 -shared -fPIC -o lookups.so lookups.c -ldl
//     LOOKUPS=names.txt LD_PRELOAD=./lookups.so python3 workload.py
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef int (*lookup_v1)(const char *, void **, int, unsigned long long);
typedef int (*lookup_v2)(const char *, void **, int, unsigned long long, int *);
static lookup_v1 real_v1;
static lookup_v2 real_v2;

static void note(const char *how, const char *name, int version) {
    const char *path = getenv("LOOKUPS");
    if (!path || !name) return;
    int file = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
    if (file < 0) return;
    char line[256];
    int length = snprintf(line, sizeof line, "%s\t%s\t%d\n", how, name, version);
    if (length > 0 && write(file, line, (size_t)length) < 0) length = 0;
    close(file);
}

static int asked_v1(const char *name, void **out, int version, unsigned long long flags) {
    note("cuGetProcAddress", name, version);
    int code = real_v1(name, out, version, flags);
    if (code == 0 && name && strcmp(name, "cuGetProcAddress") == 0 && out) *out = (void *)asked_v1;
    return code;
}

static int asked_v2(const char *name, void **out, int version, unsigned long long flags, int *status) {
    note("cuGetProcAddress_v2", name, version);
    int code = real_v2(name, out, version, flags, status);
    if (code == 0 && name && strcmp(name, "cuGetProcAddress") == 0 && out) {
        if (version >= 12000) {
            real_v2 = *(lookup_v2 *)out;
            *out = (void *)asked_v2;
        } else {
            real_v1 = *(lookup_v1 *)out;
            *out = (void *)asked_v1;
        }
    }
    return code;
}

void *dlsym(void *handle, const char *name) {
    static void *(*real)(void *, const char *);
    if (!real) real = (void *(*)(void *, const char *))dlvsym(RTLD_NEXT, "dlsym", "GLIBC_2.2.5");
    void *found = real(handle, name);
    if (name && (strncmp(name, "cu", 2) == 0 || strncmp(name, "nvml", 4) == 0)) {
        note("dlsym", name, 0);
        if (found && strcmp(name, "cuGetProcAddress") == 0) {
            real_v1 = (lookup_v1)found;
            return (void *)asked_v1;
        }
        if (found && strcmp(name, "cuGetProcAddress_v2") == 0) {
            real_v2 = (lookup_v2)found;
            return (void *)asked_v2;
        }
    }
    return found;
}

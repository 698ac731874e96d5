// As thief.py, as a program that is linked statically: no library can be preloaded into it.
//
//     cc -O1 -static -o thief-static thief.c -ldl
//     thief-static [MOST]
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}

static void *library;

static void *function(const char *name) {
    void *found = dlsym(library, name);
    if (!found) {
        fprintf(stderr, "%s is not there\n", name);
        exit(1);
    }
    return found;
}

static void check(const char *name, int code) {
    if (code != 0) {
        fprintf(stderr, "%s: CUDA error %d\n", name, code);
        exit(1);
    }
}

int main(int count, char **arguments) {
    static const size_t pieces[] = {256u << 20, 32u << 20, 2u << 20};
    library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) {
        fprintf(stderr, "%s\n", dlerror());
        return 1;
    }
    void *context = NULL;
    check("cuInit", ((int (*)(unsigned))function("cuInit"))(0));
    check("cuDevicePrimaryCtxRetain",
          ((int (*)(void **, int))function("cuDevicePrimaryCtxRetain"))(&context, 0));
    check("cuCtxSetCurrent", ((int (*)(void *))function("cuCtxSetCurrent"))(context));
    printf("{\"at\": %.6f, \"listed\": true}\n", now());
    fflush(stdout);
    sleep(1);
    int (*allocate)(unsigned long long *, size_t) =
        (int (*)(unsigned long long *, size_t))function("cuMemAlloc_v2");
    unsigned long long most = count > 1 ? strtoull(arguments[1], NULL, 10) : ~0ull;
    double begun = now();
    unsigned long long taken = 0, pointer;
    for (size_t i = 0; i < sizeof pieces / sizeof *pieces; i++)
        while (taken + pieces[i] <= most && allocate(&pointer, pieces[i]) == 0) taken += pieces[i];
    printf("{\"at\": %.6f, \"taken\": %llu, \"begun\": %.6f}\n", now(), taken, begun);
    fflush(stdout);
    for (;;) pause();
}

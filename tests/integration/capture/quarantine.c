/* Finds writes into memory that was freed: blocks of the size of PyTorch's buffers are never given back, but filled
 * with canaries, and looked at when the process ends. Loaded by LD_PRELOAD; the count is appended to $QUARANTINE. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SMALLEST = 16 << 10, LARGEST = 1 << 20, MOST = 1 << 16, CANARY = 0xA5 };

static struct { unsigned char *block; size_t size; } kept[MOST];
static int count;

void free(void *block) {
    static void (*really_free)(void *);
    if (!really_free) really_free = (void (*)(void *))dlsym(RTLD_NEXT, "free");
    size_t size = block ? malloc_usable_size(block) : 0;
    if (size < SMALLEST || size > LARGEST || count >= MOST) {
        really_free(block);
        return;
    }
    int at = __sync_fetch_and_add(&count, 1);
    if (at >= MOST) {
        really_free(block);
        return;
    }
    memset(block, CANARY, size);
    kept[at].size = size;
    kept[at].block = block;
}

__attribute__((destructor)) static void look(void) {
    const char *path = getenv("QUARANTINE");
    FILE *file = path ? fopen(path, "a") : NULL;
    if (!file) return;
    int dead = 0, most = count < MOST ? count : MOST;
    for (int i = 0; i < most; i++)
        for (size_t k = 0; kept[i].block && k < kept[i].size; k++)
            if (kept[i].block[k] != CANARY) { dead++; break; }
    fprintf(file, "%d %d\n", most, dead);
    fclose(file);
}

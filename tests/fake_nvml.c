/* libnvidia-ml.so.1 without a GPU: devices and processes come from the text file that FAKE_NVML names, read at each call.
 *
 *   gpu UUID NAME TOTAL USED MIG      a GPU; bytes; MIG 0 or 1; underscores in NAME are spaces
 *   lost                              the GPU before is lost
 *   part UUID NAME TOTAL USED         a MIG device of the GPU before
 *   compute PID BYTES                 a process on the device before
 *   graphics PID BYTES
 *
 * Without that file no driver is loaded.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, NOT_SUPPORTED = 3, NOT_FOUND = 6, INSUFFICIENT_SIZE = 7, DRIVER_NOT_LOADED = 9, LOST = 15 };

typedef struct { unsigned pid; unsigned long long memory; unsigned instance, part; } process;
typedef struct { unsigned version; unsigned long long total, reserved, free, used; } memory;
typedef struct {
    char uuid[96], name[96];
    unsigned long long total, used;
    int parent, mig, lost, computes, graphics;
    process compute[16], graphic[16];
} device;

static device devices[64];
static int count;

static int load(void) {
    FILE *file = fopen(getenv("FAKE_NVML") ? getenv("FAKE_NVML") : "", "r");
    if (!file) return DRIVER_NOT_LOADED;
    char line[512];
    int gpu = -1;
    count = 0;
    memset(devices, 0, sizeof devices);
    while (fgets(line, sizeof line, file)) {
        device *next = &devices[count], *last = next - 1;
        process *c = count ? &last->compute[last->computes] : NULL, *g = count ? &last->graphic[last->graphics] : NULL;
        if (sscanf(line, "gpu %95s %95s %llu %llu %d", next->uuid, next->name, &next->total, &next->used, &next->mig) == 5)
            next->parent = -1, gpu = count++;
        else if (sscanf(line, "part %95s %95s %llu %llu", next->uuid, next->name, &next->total, &next->used) == 4)
            next->parent = gpu, count++;
        else if (c && sscanf(line, "compute %u %llu", &c->pid, &c->memory) == 2) last->computes++;
        else if (g && sscanf(line, "graphics %u %llu", &g->pid, &g->memory) == 2) last->graphics++;
        else if (count && !strncmp(line, "lost", 4)) last->lost = 1;
    }
    fclose(file);
    for (int i = 0; i < count; i++)
        for (char *sign = devices[i].name; *sign; sign++)
            if (*sign == '_') *sign = ' ';
    return SUCCESS;
}

/* The device at a place among those with this parent, as a handle that stays valid over a reload. */
static int place(int parent, unsigned index, void **handle) {
    for (int i = 0; i < count; i++)
        if (devices[i].parent == parent && !index--) {
            *handle = (void *)(long)(i + 1);
            return devices[i].lost ? LOST : SUCCESS;
        }
    return NOT_FOUND;
}

static device *at(void *handle) { return &devices[(long)handle - 1]; }

static int listed(int found, process *from, unsigned *size, process *to) {
    unsigned room = *size;
    *size = found;
    if ((unsigned)found > room) return INSUFFICIENT_SIZE;
    if (found) memcpy(to, from, found * sizeof *to);
    return SUCCESS;
}

int nvmlInitWithFlags(unsigned flags) { return load(); }
int nvmlShutdown(void) { return SUCCESS; }

int nvmlSystemGetDriverVersion(char *text, unsigned size) {
    snprintf(text, size, "580.1");
    return SUCCESS;
}
const char *nvmlErrorString(int code) { return "an error"; }

int nvmlDeviceGetCount_v2(unsigned *found) {
    int code = load();
    *found = 0;
    for (int i = 0; i < count; i++) *found += devices[i].parent < 0;
    return code;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) { return place(-1, index, handle); }

int nvmlDeviceGetMigMode(void *handle, unsigned *now, unsigned *pending) {
    if (at(handle)->parent >= 0) return NOT_SUPPORTED;
    *now = *pending = at(handle)->mig;
    return SUCCESS;
}

int nvmlDeviceGetMaxMigDeviceCount(void *handle, unsigned *found) { *found = 7; return SUCCESS; }

int nvmlDeviceGetMigDeviceHandleByIndex(void *handle, unsigned index, void **part) {
    return place((int)(long)handle - 1, index, part);
}

int nvmlDeviceGetUUID(void *handle, char *text, unsigned size) {
    snprintf(text, size, "%s", at(handle)->uuid);
    return SUCCESS;
}

int nvmlDeviceGetName(void *handle, char *text, unsigned size) {
    snprintf(text, size, "%s", at(handle)->name);
    return SUCCESS;
}

int nvmlDeviceGetMemoryInfo_v2(void *handle, memory *info) {
    info->total = at(handle)->total;
    info->used = at(handle)->used;
    info->free = info->total - info->used;
    return SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *size, process *found) {
    return listed(at(handle)->computes, at(handle)->compute, size, found);
}

int nvmlDeviceGetGraphicsRunningProcesses_v3(void *handle, unsigned *size, process *found) {
    return listed(at(handle)->graphics, at(handle)->graphic, size, found);
}

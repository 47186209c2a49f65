/* A driver library whose GPUs stand in a file, $FAKE_NVML: one line each, "USED_MIB PID:MIB PID:MIB ...". Source: nvml.h. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; } Process;
enum { SUCCESS = 0, INVALID = 2, NOT_FOUND = 6, TOO_SMALL = 7 };

static int line_of(unsigned long index, char *line, int size) {
    FILE *file = fopen(getenv("FAKE_NVML"), "r");
    int found = 0;
    while (file && fgets(line, size, file) && !(found = index-- == 0)) {}
    if (file) fclose(file);
    return found;
}

int nvmlInit_v2(void) { return getenv("FAKE_NVML") ? SUCCESS : 9; }
int nvmlInitWithFlags(unsigned flags) { (void)flags; return nvmlInit_v2(); }
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int code) { return code == NOT_FOUND ? "Not Found" : "Invalid Argument"; }

int nvmlDeviceGetCount_v2(unsigned *count) {
    char line[4096];
    for (*count = 0; line_of(*count, line, sizeof line); ++*count) {}
    return SUCCESS;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    char line[4096];
    *handle = (void *)(unsigned long)(index + 1);
    return line_of(index, line, sizeof line) ? SUCCESS : INVALID;
}
int nvmlDeviceGetMemoryInfo(void *handle, Memory *memory) {
    char line[4096];
    if (!line_of((unsigned long)handle - 1, line, sizeof line)) return NOT_FOUND;
    memory->total = 80ull << 30;
    memory->used = strtoull(line, NULL, 10) << 20;
    memory->free = memory->total - memory->used;
    return SUCCESS;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, Process *processes) {
    char line[4096], *word;
    unsigned found = 0, room = *count;
    if (!line_of((unsigned long)handle - 1, line, sizeof line)) return NOT_FOUND;
    for (strtok(line, " \n"); (word = strtok(NULL, " \n")); ++found) {
        if (found < room) {
            processes[found] = (Process){.pid = (unsigned)strtoul(word, &word, 10)};
            processes[found].used = strtoull(word + 1, NULL, 10) << 20;
        }
    }
    *count = found;
    return found > room ? TOO_SMALL : SUCCESS;
}
int nvmlDeviceGetGraphicsRunningProcesses_v3(void *handle, unsigned *count, Process *processes) {
    (void)handle; (void)processes;
    *count = 0;
    return SUCCESS;
}

/* NVML as a library that does what a text file says (environment variable NVML_SCRIPT), compiled against NVIDIA's own
 * header. A line of the file is "KEY VALUE"; g0 is the first device, g0m1 the second partition of it.
 *   VALUE !15    the call fails with NVML error 15
 *   VALUE ~60    the call hangs for 60 s, then fails
 * What has no line is not supported. The file is read at every call, so that a test changes it between two samples.
 * Compiled with -DOLD it is a driver of 2019: calls that are newer are not in it. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#define NVML_NO_UNVERSIONED_FUNC_DEFS
#include "nvml.h"

static char line_value[512];

static const char *find(const char *key) {
    const char *path = getenv("NVML_SCRIPT");
    FILE *file = path ? fopen(path, "r") : NULL;
    char line[600];
    const char *result = NULL;
    if (!file) return NULL;
    while (fgets(line, sizeof line, file)) {
        char *space = strchr(line, ' ');
        if (!space) continue;
        *space = 0;
        if (strcmp(line, key)) continue;
        snprintf(line_value, sizeof line_value, "%s", space + 1);
        line_value[strcspn(line_value, "\n")] = 0;
        result = line_value;
        break;
    }
    fclose(file);
    return result;
}

static nvmlReturn_t ask(const char *prefix, const char *key, const char **value) {
    char full[128];
    const char *all = find("driver");
    if (all && *all == '!') return atoi(all + 1);
    if (*prefix) {
        snprintf(full, sizeof full, "%s.lost", prefix);
        if (find(full)) return NVML_ERROR_GPU_IS_LOST;
        snprintf(full, sizeof full, "%.2s.lost", prefix);
        if (find(full)) return NVML_ERROR_GPU_IS_LOST;
        snprintf(full, sizeof full, "%s.%s", prefix, key);
    } else
        snprintf(full, sizeof full, "%s", key);
    *value = find(full);
    if (!*value) return NVML_ERROR_NOT_SUPPORTED;
    if (**value == '!') return atoi(*value + 1);
    if (**value == '~') {
        sleep(atoi(*value + 1));
        return NVML_ERROR_TIMEOUT;
    }
    return NVML_SUCCESS;
}

/* Handles: 0x1000 + 0x100 * device, and + 1 + slot for a partition. */
static nvmlDevice_t handle_of(unsigned device, int slot) { return (nvmlDevice_t)(uintptr_t)(0x1000 + 0x100 * device + 1 + slot); }
static const char *name_of(nvmlDevice_t handle) {
    static char name[4][16];
    static int next;
    unsigned number = (unsigned)((uintptr_t)handle - 0x1000);
    char *result = name[next++ % 4];
    if (number & 0xff) snprintf(result, 16, "g%um%u", number >> 8, (number & 0xff) - 1);
    else snprintf(result, 16, "g%u", number >> 8);
    return result;
}
#define DEVICE(index) handle_of(index, -1)

#define ASK(handle, key) \
    const char *value; \
    nvmlReturn_t code = ask(name_of(handle), key, &value); \
    if (code) return code;

static nvmlReturn_t number(nvmlDevice_t handle, const char *key, unsigned *result) {
    ASK(handle, key)
    *result = (unsigned)strtoul(value, NULL, 0);
    return NVML_SUCCESS;
}
static nvmlReturn_t text(nvmlDevice_t handle, const char *key, char *result, unsigned length) {
    ASK(handle, key)
    snprintf(result, length, "%s", value);
    return NVML_SUCCESS;
}

/* The library */
static nvmlReturn_t start(void) {
    const char *value;
    nvmlReturn_t code = ask("", "init", &value);
    return code == NVML_ERROR_NOT_SUPPORTED ? NVML_SUCCESS : code;
}
nvmlReturn_t nvmlInit_v2(void) { return start(); }
nvmlReturn_t nvmlInitWithFlags(unsigned flags) { (void)flags; return start(); }
nvmlReturn_t nvmlShutdown(void) { return NVML_SUCCESS; }
const char *nvmlErrorString(nvmlReturn_t code) {
    switch (code) {
    case NVML_ERROR_GPU_IS_LOST: return "GPU is lost";
    case NVML_ERROR_UNINITIALIZED: return "Uninitialized";
    case NVML_ERROR_NOT_SUPPORTED: return "Not Supported";
    default: return "Error";
    }
}
nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned length) { snprintf(version, length, "580.65.06"); return NVML_SUCCESS; }
nvmlReturn_t nvmlDeviceGetCount_v2(unsigned *count) {
    const char *value;
    nvmlReturn_t code = ask("", "count", &value);
    if (code) return code;
    *count = atoi(value);
    return NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned index, nvmlDevice_t *device) { *device = DEVICE(index); return NVML_SUCCESS; }

/* What a device is. Its identity comes from memory: also of one that is lost. */
nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned length) {
    char key[32];
    const char *value, *all = find("driver");
    if (all && *all == '!') return atoi(all + 1);
    snprintf(key, sizeof key, "%s.uuid", name_of(device));
    value = find(key);
    snprintf(uuid, length, "%s", value ? value : key);
    return NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned length) { return text(device, "name", name, length); }
nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci) {
    memset(pci, 0, sizeof *pci);
    return text(device, "pci", pci->busId, sizeof pci->busId);
}
nvmlReturn_t nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor) {
    ASK(device, "capability")
    return sscanf(value, "%d.%d", major, minor) == 2 ? NVML_SUCCESS : NVML_ERROR_UNKNOWN;
}
nvmlReturn_t nvmlDeviceGetMaxClockInfo(nvmlDevice_t device, nvmlClockType_t type, unsigned *clock) { (void)type; return number(device, "max-clock", clock); }
nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory) {
    ASK(device, "memory") /* total reserved free used */
    unsigned long long total, reserved, free_, used;
    sscanf(value, "%llu %llu %llu %llu", &total, &reserved, &free_, &used);
    memory->total = total; memory->free = free_; memory->used = used + reserved;
    return NVML_SUCCESS;
}

/* Metrics */
nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *use) {
    ASK(device, "use")
    sscanf(value, "%u %u", &use->gpu, &use->memory);
    return NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceGetPowerUsage(nvmlDevice_t device, unsigned *power) { return number(device, "power", power); }
nvmlReturn_t nvmlDeviceGetEnforcedPowerLimit(nvmlDevice_t device, unsigned *limit) { return number(device, "power-limit", limit); }
nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, nvmlTemperatureSensors_t sensor, unsigned *t) { (void)sensor; return number(device, "temperature", t); }
nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t device, nvmlClockType_t type, unsigned *clock) {
    return number(device, type == NVML_CLOCK_SM ? "clock.sm" : type == NVML_CLOCK_MEM ? "clock.memory" : "clock.other", clock);
}
nvmlReturn_t nvmlDeviceGetPcieReplayCounter(nvmlDevice_t device, unsigned *count) { return number(device, "replays", count); }
nvmlReturn_t nvmlDeviceGetPcieThroughput(nvmlDevice_t device, nvmlPcieUtilCounter_t counter, unsigned *rate) {
    return number(device, counter == NVML_PCIE_UTIL_TX_BYTES ? "pcie-rate.tx" : "pcie-rate.rx", rate);
}
nvmlReturn_t nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, nvmlMemoryErrorType_t type, nvmlEccCounterType_t counter, unsigned long long *count) {
    ASK(device, type == NVML_MEMORY_ERROR_TYPE_CORRECTED ? "ecc.corrected" : "ecc.uncorrected")
    if (counter != NVML_AGGREGATE_ECC) return NVML_ERROR_INVALID_ARGUMENT;
    *count = strtoull(value, NULL, 0);
    return NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceGetEncoderUtilization(nvmlDevice_t device, unsigned *use, unsigned *period) { *period = 1; return number(device, "encoder", use); }
nvmlReturn_t nvmlDeviceGetDecoderUtilization(nvmlDevice_t device, unsigned *use, unsigned *period) { *period = 1; return number(device, "decoder", use); }

/* Processes: "PID BYTES, PID BYTES" and "PID TIME SM, ..." */
static nvmlReturn_t running(nvmlDevice_t device, const char *key, unsigned *count, nvmlProcessInfo_t *infos) {
    unsigned number_ = 0, room = *count;
    ASK(device, key)
    for (char *at = line_value; at && *at; at = strchr(at, ','), at = at ? at + 1 : at, number_++) {
        unsigned pid;
        unsigned long long bytes;
        if (sscanf(at, "%u %llu", &pid, &bytes) != 2) break;
        if (infos && number_ < room) infos[number_] = (nvmlProcessInfo_t){pid, bytes, 0xFFFFFFFF, 0xFFFFFFFF};
    }
    *count = number_;
    return number_ > room || (number_ && !infos) ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned *count, nvmlProcessInfo_t *infos) { return running(device, "processes", count, infos); }
nvmlReturn_t nvmlDeviceGetMPSComputeRunningProcesses_v3(nvmlDevice_t device, unsigned *count, nvmlProcessInfo_t *infos) { return running(device, "mps", count, infos); }
nvmlReturn_t nvmlDeviceGetProcessUtilization(nvmlDevice_t device, nvmlProcessUtilizationSample_t *samples, unsigned *count, unsigned long long since) {
    unsigned number_ = 0, room = *count;
    ASK(device, "process-use")
    for (char *at = line_value; at && *at; at = strchr(at, ','), at = at ? at + 1 : at) {
        unsigned pid, sm;
        unsigned long long time_;
        if (sscanf(at, "%u %llu %u", &pid, &time_, &sm) != 3) break;
        if (time_ <= since) continue;
        if (samples && number_ < room) samples[number_] = (nvmlProcessUtilizationSample_t){pid, time_, sm, 0, 0, 0};
        number_++;
    }
    *count = number_;
    if (!number_) return NVML_ERROR_NOT_FOUND;
    return !samples ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

/* Partitions */
nvmlReturn_t nvmlDeviceGetMigMode(nvmlDevice_t device, unsigned *mode, unsigned *pending) {
    char key[32]; /* from memory, as the identity */
    const char *value;
    snprintf(key, sizeof key, "%s.mig", name_of(device));
    value = find(key);
    *pending = 0;
    *mode = value ? atoi(value) : 0;
    return value ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}
nvmlReturn_t nvmlDeviceGetMaxMigDeviceCount(nvmlDevice_t device, unsigned *count) { (void)device; *count = 7; return NVML_SUCCESS; }
nvmlReturn_t nvmlDeviceGetMigDeviceHandleByIndex(nvmlDevice_t device, unsigned slot, nvmlDevice_t *mig) {
    char key[40];
    *mig = (nvmlDevice_t)((uintptr_t)device + 1 + slot);
    snprintf(key, sizeof key, "%s.uuid", name_of(*mig));
    return find(key) ? NVML_SUCCESS : NVML_ERROR_NOT_FOUND;
}
nvmlReturn_t nvmlDeviceGetGpuInstanceId(nvmlDevice_t device, unsigned *id) { return number(device, "instance", id); }
nvmlReturn_t nvmlDeviceGetComputeInstanceId(nvmlDevice_t device, unsigned *id) { (void)device; *id = 0; return NVML_SUCCESS; }
nvmlReturn_t nvmlDeviceGetAttributes_v2(nvmlDevice_t device, nvmlDeviceAttributes_t *attributes) {
    memset(attributes, 0, sizeof *attributes);
    attributes->memorySizeMB = 9984;
    return number(device, "multiprocessors", &attributes->multiprocessorCount);
}

/* Events: each line "event.N DEVICE TYPE DATA INSTANCE" is told once */
static unsigned told;
nvmlReturn_t nvmlEventSetCreate(nvmlEventSet_t *set) { *set = (nvmlEventSet_t)(uintptr_t)0x77; return NVML_SUCCESS; }
nvmlReturn_t nvmlEventSetFree(nvmlEventSet_t set) { (void)set; return NVML_SUCCESS; }
nvmlReturn_t nvmlDeviceGetSupportedEventTypes(nvmlDevice_t device, unsigned long long *types) { (void)device; *types = 0xB; return NVML_SUCCESS; }
nvmlReturn_t nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types, nvmlEventSet_t set) {
    (void)device; (void)set;
    return types == (nvmlEventTypeXidCriticalError | nvmlEventTypeDoubleBitEccError) ? NVML_SUCCESS : NVML_ERROR_INVALID_ARGUMENT;
}
nvmlReturn_t nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *data, unsigned timeout_ms) {
    char key[32];
    unsigned device, instance;
    unsigned long long type, code;
    const char *value;
    (void)set;
    snprintf(key, sizeof key, "event.%u", told);
    value = find(key);
    if (!value) { usleep(timeout_ms * 1000); return NVML_ERROR_TIMEOUT; }
    told++;
    sscanf(value, "%u %llu %llu %u", &device, &type, &code, &instance);
    *data = (nvmlEventData_t){DEVICE(device), type, code, instance, instance};
    return NVML_SUCCESS;
}

#ifndef OLD
nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory) {
    ASK(device, "memory")
    if (memory->version != nvmlMemory_v2) return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    sscanf(value, "%llu %llu %llu %llu", &memory->total, &memory->reserved, &memory->free, &memory->used);
    return NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceGetNumGpuCores(nvmlDevice_t device, unsigned *cores) { return number(device, "cores", cores); }
nvmlReturn_t nvmlDeviceGetTotalEnergyConsumption(nvmlDevice_t device, unsigned long long *energy) {
    ASK(device, "energy")
    *energy = strtoull(value, NULL, 0);
    return NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceGetRemappedRows(nvmlDevice_t device, unsigned *correctable, unsigned *uncorrectable, unsigned *pending, unsigned *failure) {
    ASK(device, "rows")
    sscanf(value, "%u %u %u %u", correctable, uncorrectable, pending, failure);
    return NVML_SUCCESS;
}
static nvmlReturn_t mask(nvmlDevice_t device, const char *key, unsigned long long *bits) {
    ASK(device, key)
    *bits = strtoull(value, NULL, 0);
    return NVML_SUCCESS;
}
nvmlReturn_t nvmlDeviceGetSupportedClocksEventReasons(nvmlDevice_t device, unsigned long long *bits) { return mask(device, "throttles-supported", bits); }
nvmlReturn_t nvmlDeviceGetCurrentClocksEventReasons(nvmlDevice_t device, unsigned long long *bits) { return mask(device, "throttles", bits); }
nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, nvmlFieldValue_t *fields) {
    const char *lost;
    if (ask(name_of(device), "lost?", &lost) == NVML_ERROR_GPU_IS_LOST) return NVML_ERROR_GPU_IS_LOST;
    for (int i = 0; i < count; i++) {
        char key[48];
        const char *value;
        snprintf(key, sizeof key, "field.%u.%u", fields[i].fieldId, fields[i].scopeId);
        fields[i].nvmlReturn = ask(name_of(device), key, &value);
        if (fields[i].nvmlReturn) continue;
        fields[i].valueType = NVML_VALUE_TYPE_UNSIGNED_LONG_LONG;
        fields[i].value.ullVal = strtoull(value, NULL, 0);
    }
    return NVML_SUCCESS;
}

/* GPM: a sample keeps when it was taken and of what; the values are those of the file when two are compared */
struct nvmlGpmSample_st { double at; char of[16]; };
static int armed[16];
static double seconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec + now.tv_nsec / 1e9;
}
nvmlReturn_t nvmlGpmQueryDeviceSupport(nvmlDevice_t device, nvmlGpmSupport_t *support) { return number(device, "gpm", &support->isSupportedDevice); }
nvmlReturn_t nvmlGpmSetStreamingEnabled(nvmlDevice_t device, unsigned state) {
    char key[4096];
    FILE *file;
    snprintf(key, sizeof key, "%s.%s", getenv("NVML_SCRIPT"), name_of(device));
    armed[((uintptr_t)device - 0x1000) >> 8] = state;
    file = fopen(key, "w"); /* what a test looks at: SCRIPT.g0 holds the state */
    if (file) { fprintf(file, "%u", state); fclose(file); }
    return NVML_SUCCESS;
}
nvmlReturn_t nvmlGpmSampleAlloc(nvmlGpmSample_t *sample) { *sample = calloc(1, sizeof **sample); return NVML_SUCCESS; }
nvmlReturn_t nvmlGpmSampleFree(nvmlGpmSample_t sample) { free(sample); return NVML_SUCCESS; }
static nvmlReturn_t take(const char *name, nvmlGpmSample_t sample) {
    const char *value;
    nvmlReturn_t code = ask(name, "gpm-sample", &value);
    if (code && code != NVML_ERROR_NOT_SUPPORTED) return code;
    sample->at = seconds();
    snprintf(sample->of, sizeof sample->of, "%s", name);
    return NVML_SUCCESS;
}
nvmlReturn_t nvmlGpmSampleGet(nvmlDevice_t device, nvmlGpmSample_t sample) { return take(name_of(device), sample); }
nvmlReturn_t nvmlGpmMigSampleGet(nvmlDevice_t device, unsigned instance, nvmlGpmSample_t sample) {
    for (int slot = 0; slot < 7; slot++) {
        char key[40];
        const char *name = name_of((nvmlDevice_t)((uintptr_t)device + 1 + slot)), *value;
        snprintf(key, sizeof key, "%s.instance", name);
        value = find(key);
        if (value && (unsigned)atoi(value) == instance) return take(name, sample);
    }
    return NVML_ERROR_INVALID_ARGUMENT;
}
nvmlReturn_t nvmlGpmMetricsGet(nvmlGpmMetricsGet_t *get) {
    if (get->version != NVML_GPM_METRICS_GET_VERSION || strcmp(get->sample1->of, get->sample2->of)) return NVML_ERROR_INVALID_ARGUMENT;
    if (get->sample2->at - get->sample1->at < 0.1) return NVML_ERROR_NO_DATA;
    for (unsigned i = 0; i < get->numMetrics; i++) {
        char key[32];
        const char *value;
        snprintf(key, sizeof key, "gpm.%u", get->metrics[i].metricId);
        get->metrics[i].nvmlReturn = ask(get->sample2->of, key, &value);
        if (!get->metrics[i].nvmlReturn) get->metrics[i].value = strtod(value, NULL);
    }
    return NVML_SUCCESS;
}
#endif

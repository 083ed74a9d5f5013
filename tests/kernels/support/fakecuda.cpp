// A libcuda of a few functions, which checks how it is called and copies at once; kernels are those of copy.cu, as
// plain C++. Its log is read by the tests. With a card (card.h) it copies nothing and keeps virtual time instead.

#include "shim.cpp"
#include "card.h"

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>

typedef int Result;
enum { SUCCESS = 0, INVALID = 1, OUT_OF_MEMORY = 2, INVALID_CONTEXT = 201, NOT_FOUND = 500, NOT_READY = 600 };

struct Attributes {  // CUmemcpyAttributes
    int order, src_type, src_id, dst_type, dst_id;
    unsigned flags;
};

static std::string calls;
static int initialized = 0, depth = 0, handles = 0, pending = 0, has_batch = 1, refuse_memory = 0, refuse_kernels = 0, moved = 0;
static uint64_t registered = 0;
static void note(const char* name) { calls += name; calls += ' '; }
static double cost(const char* name) { return card.on ? card.p[name] : 0; }
#define NEEDS_CONTEXT           \
    if (!card.on) note(__func__); \
    if (depth < 1) return INVALID_CONTEXT

extern "C" {
const char* fake_calls() { return calls.c_str(); }
void fake_reset(int batch, int pend, int no_memory) {
    calls.clear();
    has_batch = batch, pending = pend, refuse_memory = no_memory, refuse_kernels = 0, card.on = false;
}
int fake_depth() { return depth; }
void fake_refuse_kernels(int yes) { refuse_kernels = yes; }
void fake_map_elsewhere(int yes) { moved = yes; }

Result cuInit(unsigned flags) { initialized = 1; return flags ? INVALID : SUCCESS; }
Result cuDeviceGet(int* device, int ordinal) { *device = 30 + ordinal; return initialized ? SUCCESS : 3; }
Result cuDevicePrimaryCtxRetain(void** context, int device) { *context = (void*)0x77; return device == 30 ? SUCCESS : INVALID; }
Result cuDevicePrimaryCtxRelease_v2(int) { note(__func__); return SUCCESS; }
Result cuCtxPushCurrent_v2(void* context) { ++depth; return context == (void*)0x77 ? SUCCESS : INVALID; }
Result cuCtxPopCurrent_v2(void**) { --depth; return SUCCESS; }
Result cuDeviceGetName(char* text, int length, int) { strncpy(text, "Fake GPU", length); return SUCCESS; }
Result cuDriverGetVersion(int* version) { *version = 13000; return SUCCESS; }
Result cuDeviceGetPCIBusId(char* text, int length, int) { strncpy(text, "0000:1B:00.0", length); return SUCCESS; }
Result cuStreamCreateWithPriority(void** stream, unsigned flags, int) {
    NEEDS_CONTEXT;
    *stream = (void*)(intptr_t)(1000 + ++handles);
    return flags == 1 ? SUCCESS : INVALID;
}
Result cuStreamDestroy_v2(void*) { NEEDS_CONTEXT; return SUCCESS; }
Result cuStreamWaitEvent(void* stream, void* event, unsigned flags) {
    NEEDS_CONTEXT;
    if (card.on) card.spend(cost("host_call_s")), card.wait((intptr_t)stream, (intptr_t)event);
    return stream && event && !flags ? SUCCESS : INVALID;
}
Result cuEventCreate(void** event, unsigned flags) {
    NEEDS_CONTEXT;
    *event = (void*)(intptr_t)(5000 + ++handles);
    return flags == 2 ? SUCCESS : INVALID;
}
Result cuEventDestroy_v2(void*) { NEEDS_CONTEXT; return SUCCESS; }
Result cuEventRecord(void* event, void* stream) {
    NEEDS_CONTEXT;
    if (card.on) card.spend(cost("host_call_s")), card.record((intptr_t)stream, (intptr_t)event);
    return event ? SUCCESS : INVALID;
}
Result cuEventQuery(void* event) {
    NEEDS_CONTEXT;
    if (card.on) {
        card.spend(cost("host_call_s"));
        return card.reached((intptr_t)event) ? SUCCESS : NOT_READY;
    }
    return pending > 0 ? (--pending, NOT_READY) : pending < 0 ? 700 : SUCCESS;
}
Result cuMemcpyAsync(uint64_t dst, uint64_t src, size_t nbytes, void* stream) {
    NEEDS_CONTEXT;
    if (!stream) return INVALID;
    if (card.on) {
        card.spend(cost("host_copy_s"));
        card.copy((intptr_t)stream, &dst, &src, &nbytes, 1);
        return SUCCESS;
    }
    memcpy((void*)dst, (void*)src, nbytes);
    return SUCCESS;
}
Result cuMemAlloc_v2(uint64_t* address, size_t nbytes) {
    NEEDS_CONTEXT;
    if (refuse_memory) return OUT_OF_MEMORY;
    *address = (uint64_t)aligned_alloc(512, (nbytes + 511) / 512 * 512);
    card.own[*address] = *address + nbytes;
    return *address ? SUCCESS : OUT_OF_MEMORY;
}
Result cuMemFree_v2(uint64_t address) {
    NEEDS_CONTEXT;
    card.own.erase(address);
    free((void*)address);
    return SUCCESS;
}
Result cuMemHostAlloc(void** address, size_t nbytes, unsigned flags) {
    NEEDS_CONTEXT;
    if (refuse_memory || flags != 3) return OUT_OF_MEMORY;
    *address = aligned_alloc(4096, (nbytes + 4095) / 4096 * 4096);
    card.own[(uint64_t)*address] = card.host[(uint64_t)*address] = (uint64_t)*address + nbytes;
    return *address ? SUCCESS : OUT_OF_MEMORY;
}
Result cuMemFreeHost(void* address) {
    NEEDS_CONTEXT;
    card.own.erase((uint64_t)address), card.host.erase((uint64_t)address);
    free(address);
    return SUCCESS;
}
Result cuMemHostRegister_v2(void* address, size_t nbytes, unsigned flags) {
    NEEDS_CONTEXT;
    registered = (uint64_t)address;
    if (card.on) card.host[registered] = registered + nbytes;
    return nbytes && flags == 3 ? SUCCESS : INVALID;
}
Result cuMemHostGetDevicePointer_v2(uint64_t* mapped, void* address, unsigned flags) {
    NEEDS_CONTEXT;
    *mapped = (uint64_t)address + (moved ? 4096 : 0);
    return (uint64_t)address == registered && !flags ? SUCCESS : INVALID;
}
Result cuMemHostUnregister(void* address) { NEEDS_CONTEXT; card.host.erase((uint64_t)address); return SUCCESS; }

// A CUfunction is the unit of a copy kernel, or 99 for the delay.
Result cuModuleLoadData(void** module, const void* image) {
    NEEDS_CONTEXT;
    *module = (void*)0x99;
    return strstr((const char*)image, ".target sm_80") ? SUCCESS : 200;
}
Result cuModuleGetFunction(void** function, void* module, const char* name) {
    NEEDS_CONTEXT;
    if (refuse_kernels) return NOT_FOUND;
    *function = (void*)(intptr_t)(strcmp(name, "kvtier_delay") ? atoi(strrchr(name, '_') + 1) : 99);
    return module == (void*)0x99 ? SUCCESS : INVALID;
}
Result cuModuleUnload(void*) { NEEDS_CONTEXT; return SUCCESS; }

Result cuLaunchKernel(void* function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                      unsigned block_y, unsigned block_z, unsigned shared, void* stream, void** params, void** extra) {
    NEEDS_CONTEXT;
    if (!stream || extra || shared || grid_y != 1 || grid_z != 1 || block_y != 1 || block_z != 1) return INVALID;
    if (block_x > 1024 || !grid_x || !block_x) return INVALID;
    u64 wide[8];
    u32 narrow[5];
    if ((intptr_t)function == 99) {
        memcpy(wide, params[0], 8);
        run_delay(wide[0]);
        return SUCCESS;
    }
    for (int i = 0; i < 8; ++i) memcpy(&wide[i], params[i], 8);
    for (int i = 0; i < 5; ++i) memcpy(&narrow[i], params[8 + i], 4);
    if (card.on) {
        card.spend(cost("host_launch_s"));
        const double nbytes = (double)narrow[0] * narrow[1] * narrow[2] * narrow[3] * narrow[4];
        card.kernel((intptr_t)stream, (const uint64_t*)wide[0], (const uint64_t*)wide[1], nbytes, grid_x, block_x,
                    (double)(intptr_t)function);
        return SUCCESS;
    }
    return run_copy((u64)(intptr_t)function, grid_x, block_x, wide, narrow, (const Items*)params[13]) ? INVALID : SUCCESS;
}

// The arguments of the 12.8 interface.
Result fake_batch(uint64_t* dsts, uint64_t* srcs, size_t* sizes, size_t count, Attributes* attributes, size_t* first,
                  size_t attribute_count, size_t* failed, void* stream) {
    NEEDS_CONTEXT;
    if (!stream || !failed || attribute_count != 1 || *first != 0 || attributes->order != 1 || attributes->flags)
        return INVALID;
    if (card.on) {
        card.spend(cost("host_copy_s") + cost("host_descriptor_s") * (double)count);
        card.copy((intptr_t)stream, dsts, srcs, sizes, count);
        return SUCCESS;
    }
    for (size_t i = 0; i < count; ++i) memcpy((void*)dsts[i], (void*)srcs[i], sizes[i]);
    return SUCCESS;
}
Result cuGetProcAddress_v2(const char* symbol, void** address, int version, uint64_t flags, int* status) {
    const bool known = has_batch && version == 12080 && !flags && !strcmp(symbol, "cuMemcpyBatchAsync");
    *address = known ? (void*)fake_batch : nullptr;
    *status = known ? 0 : 1;
    return known ? SUCCESS : NOT_FOUND;
}
}

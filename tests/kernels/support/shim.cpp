// copy.cu as plain C++: the names it needs of CUDA, and a grid that runs its threads one after another.
//
// As a shared object it gives tests the kernels to call. As a program (with the sanitizers) it reads cases from
// standard input and writes back the destination, in buffers of exactly the stated size, so that one byte too far
// is a report.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

#define __global__
#define __device__
#define __launch_bounds__(threads)
#define __grid_constant__

struct Dim {
    unsigned int x = 1;
};
static thread_local Dim gridDim, blockDim, blockIdx, threadIdx;

struct alignas(8) uint2 {
    unsigned int x, y;
};
struct alignas(16) uint4 {
    unsigned int x, y, z, w;
};
static long long clock64() {
    static long long cycles = 0;
    return cycles += 1000;
}

#include KERNEL_SOURCE

using Kernel = void (*)(const u64*, const u64*, u64, u64, u64, u64, u64, u64, u32, u32, u32, u32, u32, Items);

static Kernel kernel_of(u64 unit) {
    switch (unit) {
        case 1: return kvtier_copy_1;
        case 2: return kvtier_copy_2;
        case 4: return kvtier_copy_4;
        case 8: return kvtier_copy_8;
        case 16: return kvtier_copy_16;
        default: return nullptr;
    }
}

// wide: two table addresses, two strides, four axis strides; narrow: items, planes, count_a, count_b, row_bytes.
extern "C" int run_copy(u64 unit, u32 ctas, u32 threads, const u64* wide, const u32* narrow, const Items* numbers) {
    Kernel kernel = kernel_of(unit);
    if (!kernel) return 1;
    gridDim.x = ctas;
    blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < ctas; ++blockIdx.x)
        for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x)
            kernel((const u64*)wide[0], (const u64*)wide[1], wide[2], wide[3], wide[4], wide[5], wide[6], wide[7],
                   narrow[0], narrow[1], narrow[2], narrow[3], narrow[4], *numbers);
    return 0;
}

extern "C" void run_delay(u64 cycles) { kvtier_delay(cycles); }

static unsigned char* page_aligned(u64 nbytes) {
    void* memory = nullptr;
    if (posix_memalign(&memory, 4096, nbytes ? nbytes : 1)) abort();
    return (unsigned char*)memory;
}

static void take(void* into, size_t nbytes) {
    if (nbytes && fread(into, 1, nbytes, stdin) != nbytes) exit(0);
}

int main() {
    for (;;) {
        // unit, ctas, threads, items, planes, count_a, count_b, row, src stride, dst stride, src a, dst a, src b,
        // dst b, src bytes, dst bytes
        u64 head[16];
        take(head, sizeof head);
        const u64 items = head[3], planes = head[4];
        std::vector<u64> src_bases(planes), dst_bases(planes);
        Items numbers{};
        take(src_bases.data(), 8 * planes);
        take(dst_bases.data(), 8 * planes);
        take(numbers.src, 4 * items);
        take(numbers.dst, 4 * items);
        unsigned char *src = page_aligned(head[14]), *dst = page_aligned(head[15]);
        take(src, head[14]);
        take(dst, head[15]);
        for (u64& base : src_bases) base += (u64)src;
        for (u64& base : dst_bases) base += (u64)dst;
        const u64 wide[8] = {(u64)src_bases.data(), (u64)dst_bases.data(), head[8], head[9],
                             head[10], head[11], head[12], head[13]};
        const u32 narrow[5] = {(u32)items, (u32)planes, (u32)head[5], (u32)head[6], (u32)head[7]};
        if (run_copy(head[0], (u32)head[1], (u32)head[2], wide, narrow, &numbers)) return 2;
        if (fwrite(dst, 1, head[15], stdout) != head[15] || fflush(stdout)) return 3;
        free(src);
        free(dst);
    }
}

// Copies whole blocks between two paged memories, on the GPU. Either side may be pinned host memory.
//
// An element's address is  bases[plane] + item * stride + a * stride_a + b * stride_b + byte, where plane runs over
// layers and K/V, and a, b are the token and head axes, or extents of 1 where rows are longer (see grid.py, which
// computes the arguments). Neighbouring threads move neighbouring bytes of a row, then the next b: the caller puts
// the axis that is denser in host memory last, so that what crosses the bus is contiguous.
//
// A launch's items travel with it as a parameter (4 KiB is what every driver takes), so that no table has to be copied
// behind the copies that fill the link. The bases are the same for every launch and lie in device memory.
//
// The kernels use no shared memory, no barriers and no CUDA headers, so that the same source also builds as plain
// C++ with the few names below supplied by the includer. copy.ptx is this file as compiled (see `make ptx`).

typedef unsigned long long u64;
typedef unsigned int u32;

#define KVTIER_ITEMS 480
struct Items {
    u32 src[KVTIER_ITEMS], dst[KVTIER_ITEMS];
};

// Loads in flight per thread: what hides the latency of the bus with few blocks of threads.
#define KVTIER_UNROLL 4

template <typename Unit>
__device__ void copy_blocks(const u64* src_bases, const u64* dst_bases, u64 src_stride, u64 dst_stride, u64 src_a,
                            u64 dst_a, u64 src_b, u64 dst_b, u32 items, u32 planes, u32 count_a, u32 count_b,
                            u32 row_bytes, const Items& numbers) {
    const u32 units = row_bytes / (u32)sizeof(Unit);  // per row
    const u32 total = items * planes * count_a * count_b * units;  // below 2^31, the caller sees to it
    const u32 step = gridDim.x * blockDim.x;
    for (u32 first = blockIdx.x * blockDim.x + threadIdx.x; first < total; first += step * KVTIER_UNROLL) {
        Unit held[KVTIER_UNROLL];
        u64 target[KVTIER_UNROLL];
#pragma unroll
        for (u32 k = 0; k < KVTIER_UNROLL; ++k) {
            const u32 index = first + k * step;
            target[k] = 0;
            if (index < total) {
                u32 rest = index / units;
                const u64 byte = (u64)(index - rest * units) * sizeof(Unit);
                const u32 b = rest % count_b;
                rest /= count_b;
                const u32 a = rest % count_a;
                rest /= count_a;
                const u32 plane = rest % planes;
                const u32 item = rest / planes;
                const u64 source = src_bases[plane] + numbers.src[item] * src_stride + a * src_a + b * src_b + byte;
                target[k] = dst_bases[plane] + numbers.dst[item] * dst_stride + a * dst_a + b * dst_b + byte;
                held[k] = *(const Unit*)source;
            }
        }
#pragma unroll
        for (u32 k = 0; k < KVTIER_UNROLL; ++k) {
            if (target[k]) *(Unit*)target[k] = held[k];
        }
    }
}

#define KVTIER_COPY_KERNEL(BYTES, UNIT)                                                                              \
    extern "C" __global__ void __launch_bounds__(1024) kvtier_copy_##BYTES(                                          \
        const u64* src_bases, const u64* dst_bases, u64 src_stride, u64 dst_stride, u64 src_a, u64 dst_a, u64 src_b, \
        u64 dst_b, u32 items, u32 planes, u32 count_a, u32 count_b, u32 row_bytes,                                   \
        const __grid_constant__ Items numbers) {                                                                     \
        copy_blocks<UNIT>(src_bases, dst_bases, src_stride, dst_stride, src_a, dst_a, src_b, dst_b, items, planes,   \
                          count_a, count_b, row_bytes, numbers);                                                     \
    }

KVTIER_COPY_KERNEL(1, unsigned char)
KVTIER_COPY_KERNEL(2, unsigned short)
KVTIER_COPY_KERNEL(4, unsigned int)
KVTIER_COPY_KERNEL(8, uint2)
KVTIER_COPY_KERNEL(16, uint4)

// Keeps a stream busy for about `cycles` clock cycles: the fault mode that widens races.
extern "C" __global__ void kvtier_delay(u64 cycles) {
    const u64 start = (u64)clock64();
    while ((u64)clock64() - start < cycles) {
    }
}

// The mean of arrays of several GPUs, in place, over links on which one GPU reads and writes another's memory. The text
// before defines SIZE, the number of GPUs. Each GPU computes its part of the mean and stores it on all of them, so that
// each number crosses a link twice and each GPU's memory once in either direction.
// memory, flags: each GPU's address of the array, and of gridDim.x * SIZE turns that begin at 0.
// count: packs of four numbers. stop: set by the host where a GPU may not come.

struct __align__(16) Four {
    float x, y, z, w;
};

#define EACH (SIZE < 8 ? 8 / SIZE : 1)
#define LOOKS 1024

// Waits until this block has come here on all GPUs, and what each of them has stored before is seen by all.
__device__ void meet(unsigned int *const *flags, int rank, unsigned int turn, const volatile int *stop) {
    __syncthreads();
    if (threadIdx.x < SIZE) {
        const unsigned int slot = blockIdx.x * SIZE;
        const unsigned int *own = flags[rank] + slot + threadIdx.x;
        unsigned int seen;
        __threadfence_system();
        asm volatile("st.release.sys.global.u32 [%0], %1;" : : "l"(flags[threadIdx.x] + slot + rank), "r"(turn) : "memory");
        for (unsigned int looks = 1;; ++looks) {
            asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(seen) : "l"(own) : "memory");
            // The turns go round after 2^32.
            if ((int)(seen - turn) >= 0 || (looks % LOOKS == 0 && *stop)) break;
        }
    }
    __syncthreads();
}

// Divided before they are added, as NCCL does: the sum cannot become infinite.
__device__ __forceinline__ Four scaled(Four x) {
    const float factor = 1.0f / SIZE;
    return {x.x * factor, x.y * factor, x.z * factor, x.w * factor};
}

__device__ __forceinline__ void average(Four *const (&arrays)[SIZE], long long first, long long step, long long end) {
    Four parts[EACH][SIZE];
#pragma unroll
    for (int u = 0; u < EACH; ++u) {
        const long long place = first + u * step < end ? first + u * step : first;
#pragma unroll
        for (int r = 0; r < SIZE; ++r) parts[u][r] = arrays[r][place];
    }
#pragma unroll
    for (int u = 0; u < EACH; ++u) {
        if (first + u * step >= end) break;
        Four sum = scaled(parts[u][0]);
#pragma unroll
        for (int r = 1; r < SIZE; ++r) {
            const Four other = scaled(parts[u][r]);
            sum = {sum.x + other.x, sum.y + other.y, sum.z + other.z, sum.w + other.w};
        }
#pragma unroll
        for (int r = 0; r < SIZE; ++r) arrays[r][first + u * step] = sum;
    }
}

extern "C" __global__ void __launch_bounds__(512) all_reduce(
    Four *const *memory, unsigned int *const *flags, long long offset, long long count, int rank, const int *stop) {
    if (count == 0) return;
    const unsigned int turn = flags[rank][blockIdx.x * SIZE + rank];
    meet(flags, rank, turn + 1, stop);
    Four *arrays[SIZE];
#pragma unroll
    for (int r = 0; r < SIZE; ++r) arrays[r] = memory[r] + offset;
    const long long end = count * (rank + 1) / SIZE;
    const long long step = (long long)gridDim.x * blockDim.x;
    const long long own = count * rank / SIZE + (long long)blockIdx.x * blockDim.x + threadIdx.x;
    for (long long first = own; first < end; first += EACH * step) average(arrays, first, step, end);
    meet(flags, rank, turn + 2, stop);
}

// The sum of arrays of one size that lie behind one another, always in the same order. Blocks of (32, 8) threads.

// The sum of element `i` of so many parts, for threads with threadIdx.y == 0.
__device__ __forceinline__ float sum_of_parts(const float *parts, int i, int count, int number) {
    __shared__ float shared[8][32];
    float sum = 0.0f;
    if (i < count) {
        // Eight threads a sum, whatever the device: the order is that of the numbers.
#pragma unroll 8
        for (int part = threadIdx.y; part < number; part += 8) sum += parts[(size_t)part * count + i];
    }
    shared[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
#pragma unroll
    for (int k = 1; k < 8; ++k) sum += shared[k][threadIdx.x];
    return sum;
}

extern "C" __global__ void __launch_bounds__(256) sum_parts(const float *parts, float *out, int count, int number, int accumulate) {
    const int i = blockIdx.x * 32 + threadIdx.x;
    const float sum = sum_of_parts(parts, i, count, number);
    if (threadIdx.y == 0 && i < count) out[i] = accumulate ? out[i] + sum : sum;
}

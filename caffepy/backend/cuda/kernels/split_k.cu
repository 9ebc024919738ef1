// The sum of arrays of one size that lie behind one another, always in the same order. Blocks of (32, 8) threads.

extern "C" __global__ void __launch_bounds__(256) sum_parts(const float *parts, float *out, int count, int number, int accumulate) {
    __shared__ float shared[8][32];
    const int i = blockIdx.x * 32 + threadIdx.x;
    float sum = 0.0f;
    if (i < count) {
#pragma unroll 8
        for (int part = threadIdx.y; part < number; part += 8) sum += parts[(size_t)part * count + i];
    }
    shared[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y != 0 || i >= count) return;
#pragma unroll
    for (int k = 1; k < 8; ++k) sum += shared[k][threadIdx.x];
    out[i] = accumulate ? out[i] + sum : sum;
}

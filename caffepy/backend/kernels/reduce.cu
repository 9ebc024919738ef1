// Second stage of a reduction: adds up the partial sums of the first, always in the same order.

// One warp a result: lanes take every 32nd partial sum. blockIdx.y counts the outputs, of which there are at most four.
extern "C" __global__ void combine(const double *partial, int splits, int size, int accumulate, float *out0, float *out1,
                                   float *out2, float *out3) {
    const int c = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    if (c >= size) return;
    float *out = blockIdx.y == 0 ? out0 : blockIdx.y == 1 ? out1 : blockIdx.y == 2 ? out2 : out3;
    partial += (size_t)blockIdx.y * splits * size;
    double sum = 0.0;
    for (int s = threadIdx.x % 32; s < splits; s += 32) sum += partial[(size_t)s * size + c];
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) out[c] = (float)((accumulate ? (double)out[c] : 0.0) + sum);
}

// Sets *flag to 1 if some element is NaN or infinite.
extern "C" __global__ void find_non_finite(const float *x, unsigned long long n, int *flag) {
    bool bad = false;
    const unsigned long long step = (unsigned long long)gridDim.x * blockDim.x;
    for (unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step)
        bad |= !isfinite(x[i]);
    if (bad) *flag = 1;
}

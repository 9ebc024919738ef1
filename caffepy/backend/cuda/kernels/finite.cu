// Sets *flag to 1 if some element is NaN or infinite. The text before defines TYPE and WIDTH; n counts packs.

#define EACH 4

extern "C" __global__ void find_non_finite(const TYPE *x, unsigned long long n, int *flag) {
    bool bad = false;
    const unsigned long long step = (unsigned long long)gridDim.x * blockDim.x;
    const unsigned long long own = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;
    for (unsigned long long first = own; first < n; first += EACH * step) {
        Pack<TYPE, WIDTH> values[EACH];
#pragma unroll
        for (int u = 0; u < EACH; ++u) values[u] = load_raw<WIDTH>(x, min(first + u * step, n - 1));
#pragma unroll
        for (int u = 0; u < EACH; ++u)
#pragma unroll
            for (int k = 0; k < WIDTH; ++k) bad |= !isfinite(to_float(values[u][k]));
    }
    // All writers write the same, so no atomic is needed.
    if (bad) *flag = 1;
}

// Local response normalisation across the channels of channels-last arrays (Krizhevsky et al., NIPS 2012). A window of SIZE
// channels begins BEFORE channels before its middle. The text before defines STORED, WIDTH, SIZE and LARGE. Nothing but x is
// kept for the gradient: scale and power cost less to work out than to load.
// A thread takes WIDTH channels of one pixel and what it needs of its neighbours' channels, which lie in the cache; with LARGE
// windows it takes one and reads the others in loops.

constexpr int BEFORE = (SIZE - 1) / 2, AFTER = SIZE - 1 - BEFORE;

// A scale to a power; exact to about 2^-22, as a scale is seldom far from 1.
__device__ __forceinline__ float power(float scale, float exponent) {
    float logarithm, result;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(logarithm) : "f"(scale));
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(exponent * logarithm));
    return result;
}

#define FIND_PACK                                                                  \
    const unsigned int number = blockIdx.x * blockDim.x + threadIdx.x;             \
    if (number >= count) return;                                                   \
    const unsigned int place = by_packs(number), pack = number - place * packs;    \
    const size_t row = (size_t)place * packs;

#if !LARGE

// Packs on either side in which windows of the thread's channels lie, and windows of those.
constexpr int NEAR = (AFTER + WIDTH - 1) / WIDTH, FAR = (SIZE - 1 + WIDTH - 1) / WIDTH;

// The packs REACH to either side of pack `pack` of a row, zeros outside of it.
template <int REACH>
__device__ __forceinline__ void load_row(const STORED *x, size_t row, int pack, int packs,
                                         float (&to)[(2 * REACH + 1) * WIDTH]) {
    Pack<STORED, WIDTH> raw[2 * REACH + 1] = {};
#pragma unroll
    for (int j = 0; j <= 2 * REACH; ++j) {
        const int at = pack + j - REACH;
        if (at >= 0 && at < packs) raw[j] = load_raw<WIDTH>(x, row + at);
    }
#pragma unroll
    for (int j = 0; j <= 2 * REACH; ++j)
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) to[j * WIDTH + k] = to_float(raw[j][k]);
}

// Number of a thread's first channel among those that `load_row` gives.
template <int REACH>
constexpr int OWN = REACH * WIDTH;

// The sum of squares over the window around x[c].
__device__ __forceinline__ float squares(const float *x, int c) {
    float sum = 0.0f;
#pragma unroll
    for (int j = -BEFORE; j <= AFTER; ++j) sum += x[c + j] * x[c + j];
    return sum;
}

extern "C" __global__ void lrn_forward(const STORED *x, STORED *y, unsigned int packs, Divider by_packs, float alpha,
                                       float beta, float k, unsigned int count) {
    FIND_PACK
    float around[(2 * NEAR + 1) * WIDTH];
    load_row<NEAR>(x, row, pack, packs, around);
    Pack<float, WIDTH> result;
#pragma unroll
    for (int c = 0; c < WIDTH; ++c)
        result[c] = around[OWN<NEAR> + c] * power(k + alpha * squares(around, OWN<NEAR> + c), -beta);
    store<WIDTH>(y, number, result);
}

extern "C" __global__ void lrn_backward(const STORED *x, const STORED *dy, STORED *dx, unsigned int packs, Divider by_packs,
                                        float alpha, float beta, float k, unsigned int count) {
    FIND_PACK
    float around[(2 * FAR + 1) * WIDTH], gradient[(2 * NEAR + 1) * WIDTH];
    load_row<FAR>(x, row, pack, packs, around);
    load_row<NEAR>(dy, row, pack, packs, gradient);
    // What each channel whose window may hold one of ours says about all that its window holds.
    float share[WIDTH + SIZE - 1], own[WIDTH];
#pragma unroll
    for (int j = 0; j < WIDTH + SIZE - 1; ++j) {
        const int c = j - AFTER;
        const float scale = k + alpha * squares(around, OWN<FAR> + c);
        const int channel = (int)pack * WIDTH + c;
        const bool exists = channel >= 0 && channel < (int)packs * WIDTH;
        share[j] = exists ? gradient[OWN<NEAR> + c] * around[OWN<FAR> + c] * power(scale, -beta - 1.0f) : 0.0f;
        if (c >= 0 && c < WIDTH) own[c] = power(scale, -beta);
    }
    Pack<float, WIDTH> result;
#pragma unroll
    for (int c = 0; c < WIDTH; ++c) {
        float sum = 0.0f;
#pragma unroll
        for (int j = 0; j < SIZE; ++j) sum += share[c + j];
        result[c] = gradient[OWN<NEAR> + c] * own[c] - 2.0f * alpha * beta * around[OWN<FAR> + c] * sum;
    }
    store<WIDTH>(dx, number, result);
}

#else

// The scale of one channel of a row.
__device__ float scale_of(const STORED *row, int c, int channels, float alpha, float k) {
    float sum = 0.0f;
    for (int j = max(c - BEFORE, 0); j <= min(c + AFTER, channels - 1); ++j) sum += to_float(row[j]) * to_float(row[j]);
    return k + alpha * sum;
}

extern "C" __global__ void lrn_forward(const STORED *x, STORED *y, unsigned int packs, Divider by_packs, float alpha,
                                       float beta, float k, unsigned int count) {
    FIND_PACK
    y[number] = Rounded<STORED>::one(to_float(x[number]) * power(scale_of(x + row, pack, packs, alpha, k), -beta));
}

extern "C" __global__ void lrn_backward(const STORED *x, const STORED *dy, STORED *dx, unsigned int packs, Divider by_packs,
                                        float alpha, float beta, float k, unsigned int count) {
    FIND_PACK
    const int c = pack, channels = packs;
    float sum = 0.0f;
    for (int j = max(c - AFTER, 0); j <= min(c + BEFORE, channels - 1); ++j) {
        sum += to_float(dy[row + j]) * to_float(x[row + j]) * power(scale_of(x + row, j, channels, alpha, k), -beta - 1.0f);
    }
    const float p = power(scale_of(x + row, c, channels, alpha, k), -beta);
    dx[number] = Rounded<STORED>::one(to_float(dy[number]) * p - 2.0f * alpha * beta * to_float(x[number]) * sum);
}

#endif

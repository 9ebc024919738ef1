// Pooling of channels-last arrays over whole planes, gridDim.y images. The text before defines STORED, WIDTH (the channels of a
// thread) and for the maximum MASK (int or unsigned char: pixel in the plane). A block is blockDim.x packs of an image by blockDim.y
// threads, a power of two, which take turns at its pixels.

typedef Pack<STORED, WIDTH> Raw;
typedef Pack<float, WIDTH> Values;

#define PLANES unsigned int pixels, unsigned int packs
#define EACH_PIXEL(pixel)                                                    \
    const unsigned int pack = blockIdx.x * blockDim.x + threadIdx.x;         \
    _Pragma("unroll 4") for (unsigned int pixel = threadIdx.y; pack < packs && pixel < pixels; pixel += blockDim.y)

#ifdef MASK

typedef Pack<MASK, WIDTH> Codes;

// The maxima of planes. Of equal maxima the first counts.
extern "C" __global__ void __launch_bounds__(256) max_forward_of_plane(const STORED *x, STORED *y, MASK *mask, PLANES) {
    __shared__ alignas(16) float values[256 * WIDTH];
    __shared__ alignas(16) int places[256 * WIDTH];
    Values best;
    Pack<int, WIDTH> where;
#pragma unroll
    for (int k = 0; k < WIDTH; ++k) best[k] = -3.402823466e+38f, where[k] = -1;
    EACH_PIXEL(pixel) {
        const Raw raw = load_raw<WIDTH>(x, (blockIdx.y * pixels + pixel) * packs + pack);
#pragma unroll
        for (int k = 0; k < WIDTH; ++k)
            if (wins(to_float(raw[k]), best[k])) best[k] = to_float(raw[k]), where[k] = pixel;
    }
    const int own = threadIdx.y * blockDim.x + threadIdx.x;
    for (int left = blockDim.y / 2; left > 0; left /= 2) {
        store_raw(values, own, best);
        store_raw(places, own, where);
        __syncthreads();
        if (threadIdx.y < left) {
#pragma unroll
            for (int k = 0; k < WIDTH; ++k) {
                const int at = (own + left * blockDim.x) * WIDTH + k, place = places[at];
                const float value = values[at];
                // The threads' pixels are interleaved, so of equal values the smaller number decides which one is the
                // first.
                const bool same = value == best[k] || (value != value && best[k] != best[k]);
                if (wins(value, best[k]) || (same && (unsigned int)place < (unsigned int)where[k])) best[k] = value, where[k] = place;
            }
        }
        __syncthreads();
    }
    if (threadIdx.y > 0 || pack >= packs) return;
    Codes codes;
#pragma unroll
    for (int k = 0; k < WIDTH; ++k) codes[k] = (MASK)where[k];
    store<WIDTH>(y, blockIdx.y * packs + pack, best);
    store_raw(mask, blockIdx.y * packs + pack, codes);
}

#else

// The averages of planes.
extern "C" __global__ void __launch_bounds__(256) average_forward_of_plane(const STORED *x, STORED *y, PLANES) {
    __shared__ alignas(16) float sums[256 * WIDTH];
    Values sum = {};
    EACH_PIXEL(pixel) {
        const Raw raw = load_raw<WIDTH>(x, (blockIdx.y * pixels + pixel) * packs + pack);
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) sum[k] += to_float(raw[k]);
    }
    const int own = threadIdx.y * blockDim.x + threadIdx.x;
    for (int left = blockDim.y / 2; left > 0; left /= 2) {
        store_raw(sums, own, sum);
        __syncthreads();
        if (threadIdx.y < left) {
            const Values other = load<WIDTH>(sums, own + left * blockDim.x);
#pragma unroll
            for (int k = 0; k < WIDTH; ++k) sum[k] += other[k];
        }
        __syncthreads();
    }
    if (threadIdx.y > 0 || pack >= packs) return;
#pragma unroll
    for (int k = 0; k < WIDTH; ++k) sum[k] = __fdividef(sum[k], (float)pixels);
    store<WIDTH>(y, blockIdx.y * packs + pack, sum);
}

// The gradients of these averages.
extern "C" __global__ void __launch_bounds__(256) average_backward_of_plane(const STORED *dy, STORED *dx, PLANES) {
    const float part = __fdividef(1.0f, (float)pixels);
    EACH_PIXEL(pixel) {
        Values gradient = load<WIDTH>(dy, blockIdx.y * packs + pack);
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) gradient[k] *= part;
        store<WIDTH>(dx, (blockIdx.y * pixels + pixel) * packs + pack, gradient);
    }
}

#endif

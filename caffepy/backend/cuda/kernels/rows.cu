// Elements moved by index: rows, one-hot rows, sparse maps of pixels, the largest elements, unpooling. Every sum has a fixed
// order, so that no atomic adds are needed. An index is a float, rounded towards 0. The text before defines STORED (the dtype
// of `spatial_product`; everything else is float32).

// The row that an index names, -1 if there is none.
__device__ __forceinline__ int row_of(float index, unsigned int rows) {
    return index > -1.0f && index < (float)rows ? (int)index : -1;
}

extern "C" __global__ void gather_rows(const float *source, const float *index, float *destination, int *bad,
                                       unsigned int rows, unsigned int size, unsigned int count) {
    EACH_INDEX(i, count) {
        const unsigned int n = i / size;
        const int row = row_of(index[n], rows);
        if (row < 0) *bad = (int)n;
        destination[i] = row < 0 ? 0.0f : source[(size_t)row * size + (i - n * size)];
    }
}

// One block for each row of the source and each part of its columns. The first that names a row of the destination adds up all
// that do, in their order. The threads of a block, a multiple of 32 and at most 1024, look at one index each, so that finding
// those rows does not take every thread a pass over all indices.
extern "C" __global__ void scatter_rows(const float *source, const float *index, float *destination, unsigned int items,
                                        unsigned int rows, unsigned int size) {
    __shared__ unsigned int found[32];
    const unsigned int first = blockIdx.x;
    const int row = row_of(index[first], rows);
    if (row < 0) return;
    int earlier = 0;
    for (unsigned int j = threadIdx.x; j < first; j += blockDim.x) earlier |= row_of(index[j], rows) == row;
    // Another block has found the row already; exactly one block writes each row.
    if (__syncthreads_or(earlier)) return;
    for (unsigned int begin = blockIdx.y * blockDim.x; begin < size; begin += gridDim.y * blockDim.x) {
        const unsigned int c = begin + threadIdx.x;
        float sum = c < size ? destination[(size_t)row * size + c] : 0.0f;
        for (unsigned int from = first; from < items; from += blockDim.x) {
            const unsigned int j = from + threadIdx.x;
            const int here = j < items && row_of(index[j], rows) == row;
            const unsigned int ballot = __ballot_sync(0xffffffffu, here);
            // Also the barrier behind which `found` may be overwritten.
            if (!__syncthreads_or(here)) continue;
            if (threadIdx.x % 32 == 0) found[threadIdx.x / 32] = ballot;
            __syncthreads();
            for (unsigned int w = 0; w < blockDim.x / 32; ++w)
                for (unsigned int left = found[w]; left != 0; left &= left - 1) {
                    const unsigned int item = from + 32 * w + __ffs((int)left) - 1;
                    if (c < size) sum += source[(size_t)item * size + c];
                }
        }
        if (c < size) destination[(size_t)row * size + c] = sum;
    }
}

extern "C" __global__ void one_hot(const float *labels, float *out, int *bad, unsigned int classes, unsigned int count) {
    EACH_INDEX(i, count) {
        const unsigned int n = i / classes;
        const int label = row_of(labels[n], classes);
        if (label < 0) *bad = (int)n;
        out[i] = label == (int)(i - n * classes) ? 1.0f : 0.0f;
    }
}

// x is (outer, width, inner) and y (outer, rows, inner) in memory.
extern "C" __global__ void spatial_product(const int *begins, const int *columns, const float *weights, const STORED *x,
                                           STORED *y, unsigned int rows, unsigned int width, unsigned int inner,
                                           unsigned int count) {
    EACH_INDEX(i, count) {
        const unsigned int over = i / inner, row = over % rows;
        const STORED *from = x + (size_t)(over / rows) * width * inner + (i - over * inner);
        float sum = 0.0f;
        for (int k = begins[row]; k < begins[row + 1]; ++k) sum += weights[k] * to_float(from[(size_t)columns[k] * inner]);
        y[i] = Rounded<STORED>::one(sum);
    }
}

// A number that rises with (value, index): NaN is above all, -0 is 0.
__device__ __forceinline__ unsigned long long order_of(float value, unsigned int index) {
    const unsigned int bits = __float_as_uint(value + 0.0f);
    const unsigned int rank = value != value ? 0xffffffffu : bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    return (unsigned long long)rank << 32 | index;
}

// x is (outer, classes, inner), the results are (outer, wanted, inner). One block for each position.
extern "C" __global__ void largest(const float *x, float *indices, float *values, unsigned int classes, unsigned int inner,
                                   unsigned int wanted, unsigned int positions) {
    __shared__ unsigned long long shared[32];
    __shared__ unsigned long long last;
    for (unsigned int position = blockIdx.x; position < positions; position += gridDim.x) {
        const unsigned int outer = position / inner, offset = position - outer * inner;
        const float *from = x + (size_t)outer * classes * inner + offset;
        for (unsigned int k = 0; k < wanted; ++k) {
            const unsigned long long limit = k == 0 ? 0xffffffffffffffffull : last;
            // Orders are one up, so that 0 stands for none.
            unsigned long long best = 0;
            for (unsigned int c = threadIdx.x; c < classes; c += blockDim.x) {
                const unsigned long long here = order_of(from[(size_t)c * inner], c) + 1;
                if (here < limit && here > best) best = here;
            }
            for (int step = 16; step > 0; step /= 2) {
                const unsigned long long other = __shfl_xor_sync(0xffffffffu, best, step);
                if (other > best) best = other;
            }
            if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = best;
            __syncthreads();
            if (threadIdx.x == 0) {
                for (unsigned int warp = 1; warp < blockDim.x / 32; ++warp)
                    if (shared[warp] > best) best = shared[warp];
                last = best;
                const unsigned int index = (unsigned int)(best - 1);
                const size_t to = ((size_t)outer * wanted + k) * inner + offset;
                indices[to] = (float)index;
                values[to] = from[(size_t)index * inner];
            }
            __syncthreads();
        }
    }
}

// Planes lie in memory as (samples, pixels, channels). `winners` is 0 where nothing was put, else the pixel of x plus 1.
extern "C" __global__ void unpool_choose(const float *mask, int *winners, int *bad, unsigned int channels,
                                         unsigned int pixels, unsigned int larger, unsigned int count) {
    EACH_INDEX(i, count) {
        const unsigned int over = i / channels, n = over / pixels;
        const int target = row_of(mask[i], larger);
        if (target < 0) *bad = (int)i;
        // Of several pixels with one target the last one wins, in whatever order the threads come.
        else atomicMax(winners + ((size_t)n * larger + target) * channels + (i - over * channels), (int)(over - n * pixels) + 1);
    }
}

extern "C" __global__ void unpool_put(const float *x, const int *winners, float *y, unsigned int channels,
                                      unsigned int pixels, unsigned int larger, unsigned int count) {
    EACH_INDEX(i, count) {
        const unsigned int over = i / channels, n = over / larger;
        const int winner = winners[i];
        y[i] = winner ? x[((size_t)n * pixels + winner - 1) * channels + (i - over * channels)] : 0.0f;
    }
}

extern "C" __global__ void unpool_take(const float *dy, const float *mask, float *dx, unsigned int channels,
                                       unsigned int pixels, unsigned int larger, unsigned int count) {
    EACH_INDEX(i, count) {
        const unsigned int over = i / channels, n = over / pixels;
        const int target = row_of(mask[i], larger);
        dx[i] = target < 0 ? 0.0f : dy[((size_t)n * larger + target) * channels + (i - over * channels)];
    }
}

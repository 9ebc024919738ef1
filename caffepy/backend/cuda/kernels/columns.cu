// Arrays of channels, put before kernels that walk through them. In memory an array is (rows, columns), one column a
// channel; with INNER it is (rows / inner, columns, inner).
//
// A block is blockDim.x groups of V neighbouring columns by blockDim.y rows. A thread keeps its columns, so that what
// belongs to a channel stays in registers, and takes ROWS rows at once, so that many loads are under way. Where kernels
// only go through an array, blocks take tiles of ROWS * blockDim.y rows, the last one first: what was written last is
// still in the cache. Where they add up over rows (SUMS), there are few blocks, which take turns at strips of
// blockDim.y rows.
//
// Constants that stand before: V, ROWS, THREADS, INNER, SUMS.

template <typename T>
using Elements = Words<T, V>;

template <bool YES>
struct Complete {
    static constexpr bool value = YES;
};

__device__ __forceinline__ unsigned int own_column() {
    return (blockIdx.x * blockDim.x + threadIdx.x) * V;
}

__device__ __forceinline__ unsigned int own_thread() {
    return threadIdx.y * blockDim.x + threadIdx.x;
}

__device__ __forceinline__ size_t place(unsigned int row, unsigned int column, unsigned int columns,
                                        unsigned int inner) {
    if constexpr (INNER) return ((size_t)(row / inner) * columns + column) * inner + row % inner;
    return (size_t)row * columns + column;
}

// From one of the rows that a thread takes at once to the next.
__device__ __forceinline__ unsigned int row_step() {
    return SUMS ? gridDim.y * blockDim.y : blockDim.y;
}

template <typename Work>
__device__ __forceinline__ void take(unsigned int row, unsigned int rows, Work work) {
    // The work is compiled twice: where all rows exist, which is nearly always, no load waits for a test.
    if (row + (ROWS - 1) * row_step() < rows)
        work(row, Complete<true>());
    else
        work(row, Complete<false>());
}

// Calls work(first row, Complete<all ROWS rows exist>()) until all rows of the thread are done.
template <typename Work>
__device__ __forceinline__ void walk(unsigned int rows, Work work) {
    if constexpr (SUMS) {
        for (unsigned int row = blockIdx.y * blockDim.y + threadIdx.y; row < rows; row += ROWS * row_step())
            take(row, rows, work);
    } else {
        const unsigned int tile = ROWS * blockDim.y, tiles = (rows + tile - 1) / tile;
        for (unsigned int t = blockIdx.y; t < tiles; t += gridDim.y)
            take((tiles - 1 - t) * tile + threadIdx.y, rows, work);
    }
}

// Calls work(place, elements of a, elements of b) for each row of the thread, ROWS rows after both were loaded.
template <typename A, typename B, typename Work>
__device__ __forceinline__ void walk_both(const A *a, const B *b, unsigned int column, unsigned int rows,
                                          unsigned int columns, unsigned int inner, Work work) {
    const unsigned int step = row_step();
    walk(rows, [&](unsigned int row, auto complete) {
        Elements<A> first[ROWS];
        Elements<B> second[ROWS];
#pragma unroll
        for (int u = 0; u < ROWS; ++u) {
            if (!complete.value && row + u * step >= rows) break;
            const size_t at = place(row + u * step, column, columns, inner);
            first[u].load(a + at);
            second[u].load(b + at);
        }
#pragma unroll
        for (int u = 0; u < ROWS; ++u) {
            if (!complete.value && row + u * step >= rows) break;
            work(place(row + u * step, column, columns, inner), first[u], second[u]);
        }
    });
}

// The values of the thread's columns of an array with one number a channel.
__device__ __forceinline__ void channels(const float *values, unsigned int column, float (&own)[V]) {
    if constexpr (V % 4 == 0) {
#pragma unroll
        for (int j = 0; j < V; j += 4) {
            const float4 four = *reinterpret_cast<const float4 *>(values + column + j);
            own[j] = four.x, own[j + 1] = four.y, own[j + 2] = four.z, own[j + 3] = four.w;
        }
    } else {
#pragma unroll
        for (int j = 0; j < V; ++j) own[j] = values[column + j];
    }
}

// Batch normalisation as factor * x + shift. Every kernel that asks whether this is above 0 must get the same bits.
__device__ __forceinline__ void fold(const float *mean, const float *inverse, const float *scale, const float *bias,
                                     unsigned int column, float (&factor)[V], float (&shift)[V]) {
    float m[V], b[V];
    channels(inverse, column, factor);
    channels(scale, column, b);
#pragma unroll
    for (int j = 0; j < V; ++j) factor[j] = __fmul_rn(factor[j], b[j]);
    channels(mean, column, m);
    channels(bias, column, b);
#pragma unroll
    for (int j = 0; j < V; ++j) shift[j] = __fmaf_rn(-m[j], factor[j], b[j]);
}

__device__ __forceinline__ float normalised(float x, float factor, float shift) {
    return __fmaf_rn(factor, x, shift);
}

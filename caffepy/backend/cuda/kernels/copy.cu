// Copies and sums of arrays of one shape and any strides, from one dtype to another. The text before this file defines the
// types SOURCE and STORED (the destination's), WIDTH, the elements that are neighbours in both arrays, DIMS, how many axes
// there are, and ADD, whether the destination keeps what it has.

#define EACH 4

template <typename D, typename S>
struct Converted {
    static __device__ __forceinline__ D one(S x) { return Rounded<D>::one(to_float(x)); }
};

template <typename T>
struct Converted<T, T> {
    static __device__ __forceinline__ T one(T x) { return x; }
};

template <int V, typename D, typename S>
__device__ __forceinline__ void put(D *to, Pack<S, V> values) {
    if constexpr (ADD) {
        const Pack<float, V> old = load<V>(to, 0);
        Pack<float, V> sum;
#pragma unroll
        for (int k = 0; k < V; ++k) sum[k] = old[k] + to_float(values[k]);
        store<V>(to, 0, sum);
    } else if constexpr (V == 1) {
        *to = Converted<D, S>::one(values[0]);
    } else {
        Pack<float, V> wide;
#pragma unroll
        for (int k = 0; k < V; ++k) wide[k] = to_float(values[k]);
        store<V>(to, 0, wide);
    }
}

template <int V, typename T>
__device__ __forceinline__ void put(T *to, Pack<T, V> values) {
    if constexpr (ADD) put<V, T, T>(to, values);
    else store_raw(to, 0, values);
}

// Where a pack lies in both arrays.
struct Offsets {
    long long from, to;
};

#define AXIS(k) unsigned int size##k, Divider by##k, long long from##k, long long to##k
#define WALK(k)                                                           \
    if (DIMS > k) {                                                       \
        const unsigned int above = DIMS > k + 1 ? by##k(rest) : 0u;       \
        const unsigned int here = rest - above * size##k;                 \
        at.from += here * from##k;                                        \
        at.to += here * to##k;                                            \
        rest = above;                                                     \
    }

// Axis 0 is the innermost and counts packs; one thread moves EACH packs.
extern "C" __global__ void move(const SOURCE *source, STORED *destination, AXIS(0), AXIS(1), AXIS(2), AXIS(3),
                                unsigned int count) {
    const unsigned int first = blockIdx.x * (blockDim.x * EACH) + threadIdx.x;
    Pack<SOURCE, WIDTH> values[EACH];
    long long to[EACH];
#pragma unroll
    for (int u = 0; u < EACH; ++u) {
        // Beyond the end the last pack is loaded again: without a branch all loads are issued together.
        unsigned int rest = min(first + u * blockDim.x, count - 1);
        Offsets at = {0, 0};
        WALK(0) WALK(1) WALK(2) WALK(3)
        values[u] = load_raw<WIDTH>(source + at.from, 0);
        to[u] = at.to;
    }
#pragma unroll
    for (int u = 0; u < EACH; ++u)
        if (first + u * blockDim.x < count) put<WIDTH>(destination + to[u], values[u]);
}

#define TILE 32

// Rows are neighbours in the source, columns in the destination; blockIdx.z takes batches, which have two axes. The block is
// (TILE, TILE / EACH) threads.
extern "C" __global__ void turn(const SOURCE *source, STORED *destination, unsigned int rows, unsigned int columns,
                                long long from_column, long long to_row, unsigned int size0, Divider by0, long long from0,
                                long long to0, long long from1, long long to1, unsigned int batches) {
    // With one more element a line, the elements of a column lie in different banks.
    __shared__ SOURCE tile[TILE][TILE + 1];
    const unsigned int row = blockIdx.x * TILE, column = blockIdx.y * TILE;
    for (unsigned int batch = blockIdx.z; batch < batches; batch += gridDim.z) {
        const unsigned int above = by0(batch), here = batch - above * size0;
        const SOURCE *from = source + here * from0 + above * from1;
        STORED *to = destination + here * to0 + above * to1;
#pragma unroll
        for (int u = 0; u < TILE; u += TILE / EACH) {
            const unsigned int r = row + threadIdx.x, c = column + threadIdx.y + u;
            if (r < rows && c < columns) tile[threadIdx.y + u][threadIdx.x] = from[r + c * from_column];
        }
        __syncthreads();
#pragma unroll
        for (int u = 0; u < TILE; u += TILE / EACH) {
            const unsigned int r = row + threadIdx.y + u, c = column + threadIdx.x;
            if (r < rows && c < columns) put<1>(to + r * to_row + c, Pack<SOURCE, 1>{tile[threadIdx.x][threadIdx.y + u]});
        }
        // The next batch takes the same tile.
        __syncthreads();
    }
}

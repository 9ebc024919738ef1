// Tiles of convolutions of each channel by a window of its own, over channels-last arrays; put before depthwise.cu and
// depthwise_walk.cu. What limits them is memory, so a thread computes a tile of TILE_H x TILE_W results of WIDTH neighbouring
// channels: it loads a pixel once for all windows over it.
//
// A block is blockDim.x packs of WIDTH channels by blockDim.y tiles; gridDim.x covers the channels, gridDim.y takes turns at the
// tiles, so that blocks that run together read neighbouring rows.
//
// The text before defines STORED, WIDTH, TILE_H, TILE_W, the geometry (KERNEL_H, KERNEL_W, STRIDE_H, STRIDE_W, PAD_H, PAD_W,
// DILATION_H, DILATION_W), DATA (1 for the gradient to data: results are dx, sources dy; tiles are multiples of the strides),
// THREADS of a block and CHANNELS, the most that a block has, at most THREADS.

typedef Words<STORED, WIDTH> Raw;
typedef Pack<float, WIDTH> Values;

constexpr int AREA = KERNEL_H * KERNEL_W;

__device__ constexpr int floor_of(int a, int b) { return a >= 0 ? a / b : -((b - 1 - a) / b); }

// One axis: which pixel of the source, counted from the tile's own, result i needs for weight k.
template <int KERNEL, int STRIDE, int PAD, int DILATION, int TILE>
struct Axis {
    static constexpr int FIRST = DATA ? -floor_of((KERNEL - 1) * DILATION - PAD, STRIDE) : -PAD;
    static constexpr int LAST =
        DATA ? floor_of(TILE - 1 + PAD, STRIDE) : (TILE - 1) * STRIDE + (KERNEL - 1) * DILATION - PAD;
    static constexpr int LENGTH = LAST - FIRST + 1;
    static __device__ __forceinline__ int source(int result) { return DATA ? result / STRIDE : result * STRIDE; }
    // Of result i, weight k and pixel p, counted from FIRST, two tell the third; a number outside its range where none meets them.
    // Loops compute it: tried out, all combinations would be unrolled before the compiler drops most of them.
    static __device__ __forceinline__ constexpr int quotient(int number) { return number % STRIDE == 0 ? number / STRIDE : -1; }
    static __device__ __forceinline__ constexpr int pixel(int i, int k) {
        return DATA ? quotient(i + PAD - k * DILATION - FIRST * STRIDE) : i * STRIDE + k * DILATION - PAD - FIRST;
    }
    static __device__ __forceinline__ constexpr int result(int k, int p) {
        const int number = k * DILATION - PAD;
        return DATA ? (p + FIRST) * STRIDE + number : quotient(p + FIRST - number);
    }
};

typedef Axis<KERNEL_H, STRIDE_H, PAD_H, DILATION_H, TILE_H> Rows;
typedef Axis<KERNEL_W, STRIDE_W, PAD_W, DILATION_W, TILE_W> Columns;

__device__ __forceinline__ bool within(int i, int size) { return (unsigned int)i < (unsigned int)size; }

// Arguments that say where tiles lie: planes of tile_rows x tile_columns tiles, `tiles` in all images together.
#define TILES_OF int packs, unsigned int tiles, unsigned int tile_rows, Divider by_rows, unsigned int tile_columns, \
    Divider by_columns
#define FIND_TILE                                                                                                    \
    const unsigned int over_column = by_columns(tile), n = by_rows(over_column);                                     \
    const int top = (over_column - n * tile_rows) * TILE_H, left = (tile - over_column * tile_columns) * TILE_W;

// A row of a source around a tile; zeros beyond its edges.
template <typename Across>
__device__ __forceinline__ void load_row(Raw (&row)[Across::LENGTH], const STORED *from, unsigned int line, bool inside,
                                         int left, int width, int packs, int pack) {
#pragma unroll
    for (int q = 0; q < Across::LENGTH; ++q) {
        const int column = left + q + Across::FIRST;
        if (inside && within(column, width)) {
            row[q].load(from + ((size_t)(line + column) * packs + pack) * WIDTH);
        } else {
            row[q].clear();
        }
    }
}

// The batch normalisation of each of the block's channels as factor * x + shift: the same bits as `fold` of columns.cu.
__device__ __forceinline__ void load_normalisation(float *factors, float *shifts, const float *mean, const float *inverse,
                                                   const float *scale, const float *beta, int packs) {
    const int thread = threadIdx.y * blockDim.x + threadIdx.x, channels = blockDim.x * WIDTH;
    const int channel = blockIdx.x * channels + thread;
    if (thread >= channels || channel >= packs * WIDTH) return;
    factors[thread] = __fmul_rn(inverse[channel], scale[channel]);
    shifts[thread] = __fmaf_rn(-mean[channel], factors[thread], beta[channel]);
}

// Adds up numbers[k] of each of a thread's channels over the threads of a block that have the same channels, always in the same
// order, and calls keep(k, channel, sum).
template <int NUMBER, typename Keep>
__device__ __forceinline__ void sums_of_block(const Values (&numbers)[NUMBER], int packs, Keep keep) {
    // Narrow packs leave room for four numbers at a time, which need a quarter of the barriers.
    constexpr int AT_ONCE = WIDTH <= 2 ? 4 : 1;
    __shared__ float shared[AT_ONCE * THREADS * WIDTH];
    const int channels = blockDim.x * WIDTH, threads = blockDim.x * blockDim.y;
#pragma unroll
    for (int first = 0; first < NUMBER; first += AT_ONCE) {
#pragma unroll
        for (int k = 0; k < AT_ONCE && first + k < NUMBER; ++k)
#pragma unroll
            for (int v = 0; v < WIDTH; ++v)
                shared[(k * blockDim.y + threadIdx.y) * channels + threadIdx.x * WIDTH + v] = numbers[first + k][v];
        __syncthreads();
        // One or two turns: unrolled, they would only take NVRTC time.
#pragma unroll 1
        for (int i = threadIdx.y * blockDim.x + threadIdx.x; i < min(AT_ONCE, NUMBER - first) * channels; i += threads) {
            const int k = AT_ONCE == 1 ? 0 : i / channels, own = i - k * channels, channel = blockIdx.x * channels + own;
            float sum = 0.0f;
            for (int row = 0; row < blockDim.y; ++row) sum += shared[(k * blockDim.y + row) * channels + own];
            if (channel < packs * WIDTH) keep(first + k, channel, sum);
        }
        // The next numbers take the same memory.
        __syncthreads();
    }
}

// For each weight of the window those of the block's channels: (AREA, channels).
__device__ __forceinline__ void load_weights(float *w, const STORED *weights, int packs) {
    const int channels = blockDim.x * WIDTH;
    for (int i = threadIdx.y * blockDim.x + threadIdx.x; i < AREA * channels; i += blockDim.x * blockDim.y) {
        // In memory a channel's weights are neighbours; here those of neighbouring channels are, which neighbouring
        // threads read.
        const int channel = blockIdx.x * channels + i / AREA;
        w[i % AREA * channels + i / AREA] = channel < packs * WIDTH ? to_float(weights[channel * AREA + i % AREA]) : 0.0f;
    }
}

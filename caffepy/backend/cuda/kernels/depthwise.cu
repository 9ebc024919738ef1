// Convolutions of each channel by a window of its own, over channels-last arrays. What limits them is memory, so a thread
// computes a tile of TILE_H x TILE_W results of WIDTH neighbouring channels: it loads a pixel once for all windows over it.
//
// A block is blockDim.x packs of WIDTH channels by blockDim.y tiles; gridDim.x covers the channels, gridDim.y takes turns at the
// tiles, so that blocks that run together read neighbouring rows.
//
// The text before defines STORED, WIDTH, TILE_H, TILE_W, the geometry (KERNEL_H, KERNEL_W, STRIDE_H, STRIDE_W, PAD_H, PAD_W,
// DILATION_H, DILATION_W), DATA (1 for the gradient to data: results are dx, sources dy; tiles are multiples of the strides),
// BIAS, RELU,
// SUMS (1: the results' sums and sums of squares by channel are wanted as well), THREADS of a block and CHANNELS, the most that a
// block has, at most THREADS.

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
    static __device__ __forceinline__ constexpr bool meet(int i, int k, int offset) {
        return DATA ? i + PAD - k * DILATION == offset * STRIDE : i * STRIDE + k * DILATION - PAD == offset;
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

// Adds up a number of each of a thread's channels over the threads of a block that have the same channels, always in the
// same order. The first blockDim.x * WIDTH threads get the sums of the block's channels, one each.
__device__ __forceinline__ float sum_of_block(const Values &values, float *shared) {
    const int thread = threadIdx.y * blockDim.x + threadIdx.x, channels = blockDim.x * WIDTH;
#pragma unroll
    for (int v = 0; v < WIDTH; ++v) shared[threadIdx.y * channels + threadIdx.x * WIDTH + v] = values[v];
    __syncthreads();
    float sum = 0.0f;
    if (thread < channels)
        for (int row = 0; row < blockDim.y; ++row) sum += shared[row * channels + thread];
    __syncthreads();
    return sum;
}

// y of x, or with DATA dx of dy. With SUMS `parts` gets those of each of the gridDim.y blocks of a channel: (gridDim.y, 2, C).
extern "C" __global__ void __launch_bounds__(THREADS)
depthwise(const STORED *source, const STORED *weights, const float *bias, STORED *results, float *parts, int height,
          int width, int source_height, int source_width, TILES_OF) {
    // For each weight of the window those of the block's channels.
    __shared__ alignas(16) float w[AREA * CHANNELS];
    const int pack = blockIdx.x * blockDim.x + threadIdx.x, channels = blockDim.x * WIDTH;
    for (int i = threadIdx.y * blockDim.x + threadIdx.x; i < AREA * channels; i += blockDim.x * blockDim.y) {
        const int channel = blockIdx.x * channels + i / AREA;
        w[i % AREA * channels + i / AREA] = channel < packs * WIDTH ? to_float(weights[channel * AREA + i % AREA]) : 0.0f;
    }
    __syncthreads();
    Values sum = {}, squares = {};
    for (unsigned int tile = blockIdx.y * blockDim.y + threadIdx.y; pack < packs && tile < tiles;
         tile += gridDim.y * blockDim.y) {
        FIND_TILE
        Values y[TILE_H][TILE_W] = {};
        const int source_top = Rows::source(top), source_left = Columns::source(left);
#pragma unroll
        for (int p = 0; p < Rows::LENGTH; ++p) {
            const int line = source_top + p + Rows::FIRST;
            Raw row[Columns::LENGTH];
            load_row<Columns>(row, source, (n * source_height + line) * source_width, within(line, source_height),
                              source_left, source_width, packs, pack);
#pragma unroll
            for (int k = 0; k < KERNEL_H; ++k)
#pragma unroll
                for (int i = 0; i < TILE_H; ++i) {
                    if (!Rows::meet(i, k, p + Rows::FIRST)) continue;
#pragma unroll
                    for (int l = 0; l < KERNEL_W; ++l) {
                        const Values weight = load<WIDTH>(w, (k * KERNEL_W + l) * blockDim.x + threadIdx.x);
#pragma unroll
                        for (int q = 0; q < Columns::LENGTH; ++q)
#pragma unroll
                            for (int j = 0; j < TILE_W; ++j) {
                                if (!Columns::meet(j, l, q + Columns::FIRST)) continue;
#pragma unroll
                                for (int v = 0; v < WIDTH; ++v)
                                    y[i][j][v] = fmaf(row[q][v], weight[v], y[i][j][v]);
                            }
                    }
                }
        }
#pragma unroll
        for (int i = 0; i < TILE_H; ++i)
#pragma unroll
            for (int j = 0; j < TILE_W; ++j) {
                if (top + i >= height || left + j >= width) continue;
#pragma unroll
                for (int v = 0; v < WIDTH; ++v) {
                    if (SUMS) sum[v] += y[i][j][v], squares[v] = fmaf(y[i][j][v], y[i][j][v], squares[v]);
                    if (BIAS) y[i][j][v] += bias[pack * WIDTH + v];
                    if (RELU) y[i][j][v] = larger_of(y[i][j][v], 0.0f);
                }
                store<WIDTH>(results, ((size_t)(n * height + top + i) * width + left + j) * packs + pack, y[i][j]);
            }
    }
    if constexpr (SUMS) {
        __shared__ float shared[THREADS * WIDTH];
        const float one = sum_of_block(sum, shared), other = sum_of_block(squares, shared);
        const int thread = threadIdx.y * blockDim.x + threadIdx.x, channel = blockIdx.x * channels + thread;
        if (thread < channels && channel < packs * WIDTH) {
            parts[(size_t)blockIdx.y * 2 * packs * WIDTH + channel] = one;
            parts[((size_t)blockIdx.y * 2 + 1) * packs * WIDTH + channel] = other;
        }
    }
}

// Parts of dweights of x and dy, one for each of the gridDim.y blocks of a channel: (gridDim.y, C, KERNEL_H, KERNEL_W). Here
// tiles are of dy, whose planes are height x width.
extern "C" __global__ void __launch_bounds__(THREADS)
depthwise_weights(const STORED *x, const STORED *dy, float *parts, int height, int width, int x_height, int x_width, TILES_OF) {
    __shared__ float shared[THREADS * WIDTH];
    const int pack = blockIdx.x * blockDim.x + threadIdx.x;
    Values sums[AREA] = {};
    for (unsigned int tile = blockIdx.y * blockDim.y + threadIdx.y; pack < packs && tile < tiles;
         tile += gridDim.y * blockDim.y) {
        FIND_TILE
        Raw gradients[TILE_H][TILE_W];
#pragma unroll
        for (int i = 0; i < TILE_H; ++i)
#pragma unroll
            for (int j = 0; j < TILE_W; ++j) {
                if (top + i < height && left + j < width) {
                    gradients[i][j].load(dy + (((size_t)(n * height + top + i) * width + left + j) * packs + pack) * WIDTH);
                } else {
                    gradients[i][j].clear();
                }
            }
        const int x_top = Rows::source(top), x_left = Columns::source(left);
#pragma unroll
        for (int p = 0; p < Rows::LENGTH; ++p) {
            const int line = x_top + p + Rows::FIRST;
            Raw row[Columns::LENGTH];
            load_row<Columns>(row, x, (n * x_height + line) * x_width, within(line, x_height), x_left, x_width, packs, pack);
#pragma unroll
            for (int i = 0; i < TILE_H; ++i)
#pragma unroll
                for (int k = 0; k < KERNEL_H; ++k) {
                    if (!Rows::meet(i, k, p + Rows::FIRST)) continue;
#pragma unroll
                    for (int q = 0; q < Columns::LENGTH; ++q)
#pragma unroll
                        for (int j = 0; j < TILE_W; ++j)
#pragma unroll
                            for (int l = 0; l < KERNEL_W; ++l) {
                                if (!Columns::meet(j, l, q + Columns::FIRST)) continue;
#pragma unroll
                                for (int v = 0; v < WIDTH; ++v)
                                    sums[k * KERNEL_W + l][v] =
                                        fmaf(row[q][v], gradients[i][j][v], sums[k * KERNEL_W + l][v]);
                            }
                }
        }
    }
    const int thread = threadIdx.y * blockDim.x + threadIdx.x, channel = blockIdx.x * blockDim.x * WIDTH + thread;
#pragma unroll
    for (int k = 0; k < AREA; ++k) {
        const float sum = sum_of_block(sums[k], shared);
        if (thread < blockDim.x * WIDTH && channel < packs * WIDTH)
            parts[((size_t)blockIdx.y * packs * WIDTH + channel) * AREA + k] = sum;
    }
}

// Convolutions of each channel by a window of its own, put after depthwise_tiles.cu.
//
// Standing before, beside what that needs: BIAS, RELU and SUMS (1: the results' sums and sums of squares by channel are wanted as
// well).

// Two blocks on a multiprocessor hide the loads of large windows (5x5 in float16 on an H200: 92 us become 67); with a stride, few
// results wait for each load. Without a number of blocks the compiler decides: told one, it takes more registers.
#if KERNEL_H * KERNEL_W > 9 && STRIDE_H * STRIDE_W == 1
#define BOUNDS THREADS, 2
#else
#define BOUNDS THREADS
#endif

// Moved above the products of earlier rows, the loads of large windows would fill the registers.
constexpr bool ROWS_IN_TURN = AREA > (sizeof(STORED) == 4 ? 9 : 25);

// y of x, or with DATA dx of dy. With SUMS `parts` gets those of each of the gridDim.y blocks of a channel: (gridDim.y, 2, C).
extern "C" __global__ void __launch_bounds__(BOUNDS)
depthwise(const STORED *source, const STORED *weights, const float *bias, STORED *results, float *parts, int height, int width,
          int source_height, int source_width, TILES_OF) {
    __shared__ alignas(16) float w[AREA * CHANNELS];
    const int pack = blockIdx.x * blockDim.x + threadIdx.x;
    load_weights(w, weights, packs);
    __syncthreads();
    Values sum = {}, squares = {};
    for (unsigned int tile = blockIdx.y * blockDim.y + threadIdx.y; pack < packs && tile < tiles;
         tile += gridDim.y * blockDim.y) {
        FIND_TILE
        Values y[TILE_H][TILE_W] = {};
        const int source_top = Rows::source(top), source_left = Columns::source(left);
#pragma unroll
        for (int p = 0; p < Rows::LENGTH; ++p) {
            if constexpr (ROWS_IN_TURN) asm volatile("" ::: "memory");
            const int line = source_top + p + Rows::FIRST;
            Raw row[Columns::LENGTH];
            load_row<Columns>(row, source, (n * source_height + line) * source_width, within(line, source_height), source_left,
                              source_width, packs, pack);
#pragma unroll
            for (int k = 0; k < KERNEL_H; ++k) {
                const int i = Rows::result(k, p);
                if (i < 0 || i >= TILE_H) continue;
#pragma unroll
                for (int l = 0; l < KERNEL_W; ++l) {
                    const Values weight = load<WIDTH>(w, (k * KERNEL_W + l) * blockDim.x + threadIdx.x);
#pragma unroll
                    for (int j = 0; j < TILE_W; ++j) {
                        const int q = Columns::pixel(j, l);
                        if (q < 0) continue;
#pragma unroll
                        for (int v = 0; v < WIDTH; ++v) y[i][j][v] = fmaf(row[q][v], weight[v], y[i][j][v]);
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
        const Values sums[2] = {sum, squares};
        sums_of_block(sums, packs, [&](int k, int channel, float total) {
            parts[((size_t)blockIdx.y * 2 + k) * packs * WIDTH + channel] = total;
        });
    }
}

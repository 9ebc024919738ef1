// Weight gradients of convolutions of each channel by a window of its own, put after depthwise_tiles.cu. A file of its own:
// a text takes NVRTC as long as all its kernels together.

// Parts of dweights of x and dy, one for each of the gridDim.y blocks of a channel: (gridDim.y, C, KERNEL_H, KERNEL_W). Here
// tiles are of dy, whose planes are height x width.
extern "C" __global__ void __launch_bounds__(THREADS)
depthwise_weights(const STORED *x, const STORED *dy, float *parts, int height, int width, int x_height, int x_width, TILES_OF) {
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
            for (int k = KERNEL_H - 1; k >= 0; --k) {
                const int i = Rows::result(k, p);
                if (i < 0 || i >= TILE_H) continue;
#pragma unroll
                for (int j = 0; j < TILE_W; ++j)
#pragma unroll
                    for (int l = 0; l < KERNEL_W; ++l) {
                        const int q = Columns::pixel(j, l);
#pragma unroll
                        for (int v = 0; v < WIDTH; ++v)
                            sums[k * KERNEL_W + l][v] = fmaf(row[q][v], gradients[i][j][v], sums[k * KERNEL_W + l][v]);
                    }
            }
        }
    }
    sums_of_block(sums, packs, [&](int k, int channel, float sum) {
        parts[((size_t)blockIdx.y * packs * WIDTH + channel) * AREA + k] = sum;
    });
}

// Both gradients of a depthwise convolution whose bottom is a batch normalisation of x, with RELU rectified, and the two sums that
// the normalisation's own gradient needs. Everything is read once: dy, and x, from which the bottom is computed anew.
//
// Put after split_k.cu and depthwise_tiles.cu, with DATA 1: tiles are of x and dx, whose planes are height x width. Standing before,
// beside what these need: RELU, and RESIDENT, the blocks of a multiprocessor, for which registers must do.

constexpr int NUMBERS = AREA + 2;  // that are added up for each channel

// Leaves in `parts` for each of the gridDim.y blocks of a channel dweights (C, KERNEL_H, KERNEL_W), the sums of g and the sums of
// g * (x - mean), both (C); g is dx where the rectifier was on.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
depthwise_gradients(const STORED *x, const STORED *dy, const STORED *weights, const float *mean, const float *inverse,
                    const float *scale, const float *bias, STORED *dx, float *parts, int height, int width, int source_height,
                    int source_width, TILES_OF) {
    __shared__ alignas(16) float w[AREA * CHANNELS], factors[CHANNELS], shifts[CHANNELS], means[CHANNELS];
    __shared__ float shared[THREADS * WIDTH];
    const int pack = blockIdx.x * blockDim.x + threadIdx.x, channels = blockDim.x * WIDTH;
    const int thread = threadIdx.y * blockDim.x + threadIdx.x, channel = blockIdx.x * channels + thread, all = packs * WIDTH;
    const bool holds = thread < channels && channel < all;
    load_weights(w, weights, packs);
    load_normalisation(factors, shifts, mean, inverse, scale, bias, packs);
    if (holds) means[thread] = mean[channel];
    __syncthreads();
    Values gradients[AREA] = {}, first = {}, second = {};
    for (unsigned int tile = blockIdx.y * blockDim.y + threadIdx.y; pack < packs && tile < tiles;
         tile += gridDim.y * blockDim.y) {
        FIND_TILE
        Raw own[TILE_H][TILE_W];
#pragma unroll
        for (int i = 0; i < TILE_H; ++i)
#pragma unroll
            for (int j = 0; j < TILE_W; ++j) {
                if (top + i < height && left + j < width) {
                    own[i][j].load(x + (((size_t)(n * height + top + i) * width + left + j) * packs + pack) * WIDTH);
                } else {
                    own[i][j].clear();
                }
            }
        Values bottom[TILE_H][TILE_W], results[TILE_H][TILE_W] = {};
        const Values factor = load<WIDTH>(factors, threadIdx.x), shift = load<WIDTH>(shifts, threadIdx.x);
#pragma unroll
        for (int i = 0; i < TILE_H; ++i)
#pragma unroll
            for (int j = 0; j < TILE_W; ++j) {
                const bool inside = top + i < height && left + j < width;
#pragma unroll
                for (int v = 0; v < WIDTH; ++v) {
                    const float normal = __fmaf_rn(factor[v], own[i][j][v], shift[v]);
                    bottom[i][j][v] = !inside || (RELU && normal <= 0.0f) ? 0.0f : normal;
                }
            }
        const int source_top = Rows::source(top), source_left = Columns::source(left);
#pragma unroll
        for (int p = 0; p < Rows::LENGTH; ++p) {
            const int line = source_top + p + Rows::FIRST;
            Raw row[Columns::LENGTH];
            load_row<Columns>(row, dy, (n * source_height + line) * source_width, within(line, source_height), source_left,
                              source_width, packs, pack);
#pragma unroll
            for (int k = 0; k < KERNEL_H; ++k)
#pragma unroll
                for (int i = 0; i < TILE_H; ++i) {
                    if (!Rows::meet(i, k, p + Rows::FIRST)) continue;
#pragma unroll
                    for (int l = 0; l < KERNEL_W; ++l) {
                        const Values weight = load<WIDTH>(w, (k * KERNEL_W + l) * blockDim.x + threadIdx.x);
                        Values &sum = gradients[k * KERNEL_W + l];
#pragma unroll
                        for (int q = 0; q < Columns::LENGTH; ++q)
#pragma unroll
                            for (int j = 0; j < TILE_W; ++j) {
                                if (!Columns::meet(j, l, q + Columns::FIRST)) continue;
#pragma unroll
                                for (int v = 0; v < WIDTH; ++v) {
                                    results[i][j][v] = fmaf(row[q][v], weight[v], results[i][j][v]);
                                    sum[v] = fmaf(row[q][v], bottom[i][j][v], sum[v]);
                                }
                            }
                    }
                }
        }
        const Values centre = load<WIDTH>(means, threadIdx.x);
#pragma unroll
        for (int i = 0; i < TILE_H; ++i)
#pragma unroll
            for (int j = 0; j < TILE_W; ++j) {
                if (top + i >= height || left + j >= width) continue;
#pragma unroll
                for (int v = 0; v < WIDTH; ++v) {
                    const float g = RELU && !(bottom[i][j][v] > 0.0f) ? 0.0f : results[i][j][v];
                    first[v] += g;
                    second[v] = fmaf(g, own[i][j][v] - centre[v], second[v]);
                }
                store<WIDTH>(dx, ((size_t)(n * height + top + i) * width + left + j) * packs + pack, results[i][j]);
            }
    }
    float *const out = parts + (size_t)blockIdx.y * all * NUMBERS;
#pragma unroll
    for (int k = 0; k < AREA; ++k) {
        const float sum = sum_of_block(gradients[k], shared);
        if (holds) out[channel * AREA + k] = sum;
    }
    const float one = sum_of_block(first, shared), other = sum_of_block(second, shared);
    if (holds) out[all * AREA + channel] = one, out[all * (AREA + 1) + channel] = other;
}

// dweights (+)= the sum of their parts; sum_dy and sum_dy_x = those of g and of g * (x - mean) * inverse. Blocks of (32, 8) threads.
extern "C" __global__ void __launch_bounds__(256)
finish_gradients(const float *parts, const float *inverse, float *dweights, float *sum_dy_x, float *sum_dy, int channels,
                 int number, int accumulate) {
    const int i = blockIdx.x * 32 + threadIdx.x, count = channels * NUMBERS;
    const float sum = sum_of_parts(parts, i, count, number);
    if (threadIdx.y != 0 || i >= count) return;
    if (i < channels * AREA) {
        dweights[i] = accumulate ? dweights[i] + sum : sum;
    } else if (i < channels * (AREA + 1)) {
        sum_dy[i - channels * AREA] = sum;
    } else {
        const int c = i - channels * (AREA + 1);
        sum_dy_x[c] = sum * inverse[c];
    }
}

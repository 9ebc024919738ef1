// Gradients to data of convolutions with large windows over few channels, stride 1: a thread has RUN neighbouring pixels of a row in
// registers, and moves a row of the window over a row of dy that it holds there, so that each number that is loaded is used RUN times.
//
// The text before this file defines the constants OUTPUTS, CHANNELS, KERNEL_H, KERNEL_W and PITCH, the distance of two rows of dy in
// shared memory, four more than a multiple of eight: eight rows lie in different banks.

constexpr int RUN = 8, RUNS = 8, ROWS = 8, SPLIT = 4;  // SPLIT threads share the rows of a pixel's window
constexpr int TILE_W = RUN * RUNS, TILE = ROWS * TILE_W, THREADS = RUNS * ROWS * SPLIT;
constexpr int VALUES = (KERNEL_W + RUN - 1 + 3) / 4 * 4, TAPS = (KERNEL_W + 3) / 4 * 4;
constexpr int SOURCE_H = ROWS + KERNEL_H - 1, SOURCE_W = TILE_W + KERNEL_W - 1, SOURCE = SOURCE_H * PITCH;
static_assert(PITCH % 8 == 4 && PITCH >= TILE_W - RUN + VALUES, "rows of dy lie apart");

// sums[z][n][row][column][channel] for each of gridDim.z parts of the outputs. Blocks: (tiles of an image, images times channels, parts).
extern "C" __global__ void __launch_bounds__(THREADS)
large_windows(const float *dy, const float *weights, float *sums, int images, int height, int width, int out_h, int out_w, int pad_h,
              int pad_w, int tiles_w) {
    __shared__ float4 shared[(SOURCE > SPLIT * TILE ? SOURCE : SPLIT * TILE) / 4], window[KERNEL_H * TAPS / 4];
    float *const source = reinterpret_cast<float *>(shared), *const w = reinterpret_cast<float *>(window);
    const int tile_row = blockIdx.x / tiles_w, top = tile_row * ROWS, left = (blockIdx.x - tile_row * tiles_w) * TILE_W;
    const int n = blockIdx.y / CHANNELS, channel = blockIdx.y % CHANNELS;
    const int row = threadIdx.x % ROWS, run = threadIdx.x / ROWS % RUNS, split = threadIdx.x / (ROWS * RUNS);
    const int first_h = top + pad_h - (KERNEL_H - 1), first_w = left + pad_w - (KERNEL_W - 1);
    float results[RUN] = {};
    for (int output = blockIdx.z; output < OUTPUTS; output += gridDim.z) {
        __syncthreads();
        for (int i = threadIdx.x; i < SOURCE_H * SOURCE_W; i += THREADS) {
            const int y = i / SOURCE_W, x = i % SOURCE_W, at_h = first_h + y, at_w = first_w + x;
            const bool inside = at_h >= 0 && at_h < out_h && at_w >= 0 && at_w < out_w;
            source[y * PITCH + x] = inside ? dy[(((size_t)n * out_h + at_h) * out_w + at_w) * OUTPUTS + output] : 0.0f;
        }
        for (int i = threadIdx.x; i < KERNEL_H * KERNEL_W; i += THREADS)
            w[i / KERNEL_W * TAPS + i % KERNEL_W] = weights[((size_t)output * KERNEL_H * KERNEL_W + i) * CHANNELS + channel];
        __syncthreads();
        for (int k = split; k < KERNEL_H; k += SPLIT) {
            const int lowest = top + pad_h - k;  // row of dy above which none of the block's pixels needs it
            if (lowest >= out_h || lowest + ROWS <= 0) continue;
            const float4 *const from = shared + ((row + KERNEL_H - 1 - k) * PITCH + run * RUN) / 4;
            float values[VALUES], factors[TAPS];
#pragma unroll
            for (int i = 0; i < VALUES / 4; ++i) {
                const float4 four = from[i];
                values[4 * i] = four.x, values[4 * i + 1] = four.y, values[4 * i + 2] = four.z, values[4 * i + 3] = four.w;
            }
#pragma unroll
            for (int i = 0; i < TAPS / 4; ++i) {
                const float4 four = window[k * (TAPS / 4) + i];
                factors[4 * i] = four.x, factors[4 * i + 1] = four.y, factors[4 * i + 2] = four.z, factors[4 * i + 3] = four.w;
            }
#pragma unroll
            for (int l = 0; l < KERNEL_W; ++l)
#pragma unroll
                for (int r = 0; r < RUN; ++r) results[r] = fmaf(values[r + KERNEL_W - 1 - l], factors[l], results[r]);
        }
    }
    // The sums take the place of dy in shared memory.
    __syncthreads();
    float4 *const mine = shared + (split * TILE + row * TILE_W + run * RUN) / 4;
    mine[0] = make_float4(results[0], results[1], results[2], results[3]);
    mine[1] = make_float4(results[4], results[5], results[6], results[7]);
    __syncthreads();
    for (int i = threadIdx.x; i < TILE; i += THREADS) {
        const int y = top + i / TILE_W, x = left + i % TILE_W;
        if (y >= height || x >= width) continue;
        float sum = source[i];
#pragma unroll
        for (int s = 1; s < SPLIT; ++s) sum += source[s * TILE + i];
        sums[((((size_t)blockIdx.z * images + n) * height + y) * width + x) * CHANNELS + channel] = sum;
    }
}

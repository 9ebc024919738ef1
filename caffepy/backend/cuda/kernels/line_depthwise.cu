// Convolutions over one axis of each channel by a window of its own: a block has a part of one channel of one image in shared memory.
//
// The text before this file defines the type Element and the constants KERNEL, STRIDE, PAD, DILATION, CHUNK (results of a block, a
// multiple of THREADS), FLIPPED (1: the weights are turned round, as gradients to data need them), BIAS and RELU.

constexpr int THREADS = 128, TOGETHER = 8, EACH = CHUNK / THREADS;
constexpr int SPAN = (CHUNK - 1) * STRIDE + (KERNEL - 1) * DILATION + 1;

// results[n][c][p] = the sum over k of weights[c][k] * source[n][c][p * STRIDE - PAD + k * DILATION], 0 beyond its ends.
// Blocks: `chunks` for each channel of each image.
extern "C" __global__ void __launch_bounds__(THREADS)
line_depthwise(const Element *source, const Element *weights, const float *bias, Element *results, int channels, int length,
               int out_length, int chunks) {
    __shared__ float line[SPAN];
    const int row = blockIdx.x / chunks, start = (blockIdx.x - row * chunks) * CHUNK, channel = row % channels;
    const Element *const from = source + (size_t)row * length;
    float w[KERNEL];
#pragma unroll
    for (int k = 0; k < KERNEL; ++k) w[k] = to_float(weights[channel * KERNEL + (FLIPPED ? KERNEL - 1 - k : k)]);
    for (int first = threadIdx.x; first < SPAN; first += THREADS * TOGETHER) {
        float values[TOGETHER];
#pragma unroll
        for (int u = 0; u < TOGETHER; ++u) {
            const int i = first + u * THREADS, at = start * STRIDE - PAD + i;
            values[u] = i < SPAN && at >= 0 && at < length ? to_float(from[at]) : 0.0f;
        }
#pragma unroll
        for (int u = 0; u < TOGETHER; ++u)
            if (first + u * THREADS < SPAN) line[first + u * THREADS] = values[u];
    }
    __syncthreads();
    const float shift = BIAS ? bias[channel] : 0.0f;
#pragma unroll
    for (int u = 0; u < EACH; ++u) {
        const int i = threadIdx.x + u * THREADS;
        if (start + i >= out_length) break;
        float sum = 0.0f;
#pragma unroll
        for (int k = 0; k < KERNEL; ++k) sum = fmaf(line[i * STRIDE + k * DILATION], w[k], sum);
        if (BIAS) sum += shift;
        if (RELU) sum = larger_of(sum, 0.0f);
        results[(size_t)row * out_length + start + i] = Rounded<Element>::one(sum);
    }
}

// The sums over blocks of what `walk_gradients` of depthwise_walk.cu leaves, put after split_k.cu. Standing before: AREA, the
// weights of a window.

// dweights (+)= the sum of their parts; sum_dy and sum_dy_x = those of g and of g * (x - mean) * inverse. Blocks of (32, 8) threads.
extern "C" __global__ void __launch_bounds__(256)
finish_gradients(const float *parts, const float *inverse, float *dweights, float *sum_dy_x, float *sum_dy, int channels,
                 int number, int accumulate) {
    const int i = blockIdx.x * 32 + threadIdx.x, count = channels * (AREA + 2);
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

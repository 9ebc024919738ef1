// Gradients to data of convolutions of few channels, over channels-last arrays: the lanes of a warp take an output each, so that they
// read dy as it lies, and add up their sums at the end. A warp has RUN results of a row, STRIDE_W apart: they need neighbouring pixels of
// dy and the same weights.
//
// The text before this file defines the type STORED, CHANNELS, OUTPUTS, KERNEL_D, KERNEL_H, KERNEL_W, STRIDE_D, STRIDE_H, PAD_D, PAD_H,
// DILATION_D, DILATION_H, RUN, and along a row RESIDUES ({last weight, offset in dy, taps} of every STRIDE_W-th result from each on), TAPS
// (the most), STEP (from a weight to the one that a residue takes before it) and DISTANCE (pixels of dy between them).

constexpr int THREADS = 256, MAX_TAPS = 8, LANES = 32;

struct Residue {
    int first, offset, taps;
};

__constant__ Residue residues[] = RESIDUES;
constexpr int NUMBER = sizeof(residues) / sizeof(Residue);
static_assert(RUN * CHANNELS <= LANES, "a lane writes one result");

// turned[tap][channel][output] = weights[output][tap][channel].
extern "C" __global__ void turn_weights(const STORED *weights, float *turned) {
    constexpr unsigned int EACH = KERNEL_D * KERNEL_H * KERNEL_W * CHANNELS;
    EACH_INDEX(i, EACH * OUTPUTS) turned[i] = to_float(weights[i % OUTPUTS * EACH + i / OUTPUTS]);
}

// What TAPS_NOW weights of a row, from `before` on, contribute of one output.
template <int TAPS_NOW>
__device__ __forceinline__ void add_columns(float (&sums)[RUN][CHANNELS], const STORED *line, const float *window, int before,
                                            int first, int width) {
    Words<STORED, 1> values[RUN + (TAPS_NOW - 1) * DISTANCE];  // floats only behind all loads: these would wait for each other
#pragma unroll
    for (int v = 0; v < RUN + (TAPS_NOW - 1) * DISTANCE; ++v) {
        const int at = first + before * DISTANCE + v;
        if (at >= 0 && at < width) {
            values[v].load(line + at * OUTPUTS);
        } else {
            values[v].clear();
        }
    }
#pragma unroll
    for (int l = 0; l < TAPS_NOW; ++l)
#pragma unroll
        for (int c = 0; c < CHANNELS; ++c) {
            const float factor = window[(c - (before + l) * STEP * CHANNELS) * OUTPUTS];
#pragma unroll
            for (int r = 0; r < RUN; ++r) sums[r][c] = fmaf(values[r + l * DISTANCE][0], factor, sums[r][c]);
        }
}

template <int COLUMNS>
__device__ __forceinline__ void add_all(float (&sums)[RUN][CHANNELS], const STORED *line, const float *window, int first, int width) {
    if constexpr (COLUMNS > 0) {
        constexpr int PARTS = (COLUMNS + MAX_TAPS - 1) / MAX_TAPS, EACH = (COLUMNS + PARTS - 1) / PARTS;
        constexpr int REST = COLUMNS - (PARTS - 1) * EACH, WHOLE = REST == EACH ? PARTS : PARTS - 1;
#pragma unroll 1
        for (int part = 0; part < WHOLE; ++part) add_columns<EACH>(sums, line, window, part * EACH, first, width);
        if constexpr (REST != EACH) add_columns<REST>(sums, line, window, WHOLE * EACH, first, width);
    }
}

// Which row of dy result `i` meets with weight k; negative: none.
__device__ __forceinline__ int met(int i, int k, int stride, int pad, int dilation, int length) {
    const int at = i + pad - k * dilation;
    return at < 0 || at % stride != 0 || at / stride >= length ? -1 : at / stride;
}

// dx, by `warps` warps: (n, row of results d, run, residue, row h), the last first. `origin`: the pixel of dy for the first result of all.
extern "C" __global__ void __launch_bounds__(THREADS)
few_channels(const STORED *dy, const float *turned, STORED *dx, unsigned int warps, int depth, int height, int width, int out_d,
             int out_h, int out_w, int origin, int runs) {
    const unsigned int warp = (blockIdx.x * THREADS + threadIdx.x) / LANES;
    const int lane = threadIdx.x % LANES;
    if (warp >= warps) return;
    const int h = warp % height, f = warp / height % NUMBER, run = warp / height / NUMBER % runs;
    const int plane = warp / height / NUMBER / runs, d = plane % depth, n = plane / depth;
    const Residue across = residues[f];
    const int first = origin + run * RUN + across.offset;
    float sums[RUN][CHANNELS] = {};
    for (int output = lane; output < OUTPUTS; output += LANES)
        for (int k = 0; k < KERNEL_D; ++k) {
            const int at_d = met(d, k, STRIDE_D, PAD_D, DILATION_D, out_d);
            if (at_d < 0) continue;
            for (int j = 0; j < KERNEL_H; ++j) {
                const int at_h = met(h, j, STRIDE_H, PAD_H, DILATION_H, out_h);
                if (at_h < 0) continue;
                const STORED *const line = dy + (((size_t)n * out_d + at_d) * out_h + at_h) * out_w * OUTPUTS + output;
                const float *const window = turned + ((k * KERNEL_H + j) * KERNEL_W + across.first) * CHANNELS * OUTPUTS + output;
                if (across.taps == TAPS) {
                    add_all<TAPS>(sums, line, window, first, out_w);
                } else if (NUMBER > 1 && across.taps == TAPS - 1) {
                    add_all<(NUMBER > 1 ? TAPS - 1 : 0)>(sums, line, window, first, out_w);
                }
            }
        }
    float own = 0.0f;
#pragma unroll
    for (int r = 0; r < RUN; ++r)
#pragma unroll
        for (int c = 0; c < CHANNELS; ++c) {
            const float sum = warp_sum(sums[r][c]);
            // All lanes have each sum; lane by lane they keep one, so that a single store writes neighbours.
            if (lane == r * CHANNELS + c) own = sum;
        }
    const int at = (run * RUN + lane / CHANNELS) * NUMBER + f;
    if (lane < RUN * CHANNELS && at < width)
        dx[((((size_t)n * depth + d) * height + h) * width + at) * CHANNELS + lane % CHANNELS] = Rounded<STORED>::one(own);
}

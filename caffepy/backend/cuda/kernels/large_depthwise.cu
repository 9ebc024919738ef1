// Convolutions of each channel by a large window of its own, with any stride and dilation, and their gradients, over channels-last
// arrays. All are correlations: result r of a plane is the sum over taps k of factor k times pixel r * A + k * B of the source, where
//
//   results   source  factors   A         B         are in a convolution with STRIDE and DILATION
//   y         x       weights   STRIDE    DILATION
//   dx        dy      weights   1         DILATION / gcd, turned round, for each residue: every STRIDE-th result from the residue on
//   dweights  x       dy        DILATION  STRIDE
//
// A block has a tile of the source and the factors of CHANNELS channels in shared memory. A thread has RUN columns times ROWS rows of
// results of one channel; it moves down the source and keeps ROWS rows of at most MAX_TAPS factors in registers, so that a number that
// is loaded is used RUN or ROWS times. Rows and columns of a thread lie B apart where A is 1: they need the same pixels.
//
// The text before this file defines the type STORED of the arrays but dweights, A_H, A_W, B_H, B_W, CHANNELS (of a block), TOGETHER (of
// a load; a divisor of CHANNELS and of all channels), RUN, ROWS (1 where A_H is not), RUNS and GROUPS (threads across and down), SPLIT
// (threads that share the rows of factors of a result; 1 with residues and for WEIGHTS), RESIDENT (blocks of a multiprocessor), SOURCE_H
// and SOURCE_W (the tile), PIXELS (of shared memory from a row of it to the next), EXTRA (pixels left free behind those of a thread, so
// that the threads of a warp read different banks), FACTOR_H and FACTOR_W, TAPS (columns of factors of a result; with residues the most),
// STEP_H and STEP_W (from a factor to the next, negative where they are turned round), RESIDUES_H and RESIDUES_W ({first factor, offset in
// the source, taps} of each residue), BIAS, RELU, and WEIGHTS (1: the second kernel, else the first).

constexpr int MAX_TAPS = 8, THREADS = CHANNELS * RUNS * GROUPS * SPLIT, AT_ONCE = 8;
constexpr int APART_H = A_H == 1 && ROWS > 1 ? B_H : 1, APART_W = A_W == 1 && RUN > 1 ? B_W : 1;
constexpr int TILE_H = GROUPS * ROWS, TILE_W = RUNS * RUN;
constexpr int SHIFT = APART_W * A_W;  // columns from a result's pixel to that of the thread's next
constexpr int SPAN = RUN * SHIFT, PITCH = PIXELS * CHANNELS, SOURCE = (SOURCE_H * PITCH + 3) / 4 * 4;
static_assert(EXTRA == 0 || A_W > 1, "a column's number in shared memory is known to the compiler");
static_assert(ROWS == 1 || A_H == 1, "rows that share factors share pixels");
static_assert(RUNS % APART_W == 0 && GROUPS % APART_H == 0 && CHANNELS % TOGETHER == 0, "threads cover a tile");

struct Residue {
    int first, offset, taps;
};

__constant__ Residue residues_h[] = RESIDUES_H, residues_w[] = RESIDUES_W;
constexpr int NUMBER_H = sizeof(residues_h) / sizeof(Residue), NUMBER_W = sizeof(residues_w) / sizeof(Residue);
static_assert(SPLIT == 1 || (NUMBER_H * NUMBER_W == 1 && !WEIGHTS), "who shares results has no other residues");

__device__ constexpr int divisor_of(int a, int b) { return b == 0 ? a : divisor_of(b, a % b); }

// Where column `i` of the tile lies, counted from the first of a thread's own.
__device__ __forceinline__ constexpr int place_of(int i) { return EXTRA == 0 ? i : i + i / SPAN * EXTRA; }

// to[row][column][channel] = a part of an image, 0 beyond its edges and in columns before `lowest`.
template <int HEIGHT, int WIDTH, bool SPREAD>
__device__ __forceinline__ void load_tile(float *to, const STORED *image, int first_h, int first_w, int lowest, int height, int width,
                                          int channels, int first_channel) {
    constexpr int PACKS = CHANNELS / TOGETHER, ITEMS = HEIGHT * WIDTH * PACKS;
    for (int first = threadIdx.x; first < ITEMS; first += THREADS * AT_ONCE) {
        Words<STORED, TOGETHER> values[AT_ONCE];  // floats only behind all loads: these would wait for each other
#pragma unroll
        for (int u = 0; u < AT_ONCE; ++u) {
            const int i = first + u * THREADS, pixel = i / PACKS, y = pixel / WIDTH;
            const int at_h = first_h + y, at_w = first_w + pixel - y * WIDTH, channel = first_channel + i % PACKS * TOGETHER;
            const bool inside = at_h >= 0 && at_h < height && at_w >= lowest && at_w < width;
            const bool there = i < ITEMS && inside && channel < channels;
            if (there) {
                values[u].load(image + ((size_t)at_h * width + at_w) * channels + channel);
            } else {
                values[u].clear();
            }
        }
#pragma unroll
        for (int u = 0; u < AT_ONCE; ++u) {
            const int i = first + u * THREADS, pixel = i / PACKS, y = pixel / WIDTH, at = pixel - y * WIDTH;
            float *const line = to + (SPREAD ? y * PITCH + place_of(at) * CHANNELS : pixel * CHANNELS);
            Pack<float, TOGETHER> numbers;
#pragma unroll
            for (int v = 0; v < TOGETHER; ++v) numbers[v] = values[u][v];
            if (i < ITEMS) store_raw<TOGETHER>(line, i % PACKS, numbers);
        }
    }
}

// Adds what TAPS_NOW columns of factors from `before` on contribute. `line`: the thread's first row of the source, in an image of
// `height` rows; rows beyond it are zeros.
template <int TAPS_NOW>
__device__ __forceinline__ void add_columns(float (&sums)[ROWS][RUN], const float *source, const float *factors, int before, int taps,
                                            int line, int height) {
    constexpr int GRID = divisor_of(SHIFT, B_W), VALUES = ((RUN - 1) * SHIFT + (TAPS_NOW - 1) * B_W) / GRID + 1;
    float kept[ROWS][TAPS_NOW];
    for (int first = 0; first < taps + ROWS - 1; first += ROWS) {
#pragma unroll
        for (int u = 0; u < ROWS; ++u) {
            const int p = first + u, at = line + p * B_H;
            if (p < taps) {
#pragma unroll
                for (int l = 0; l < TAPS_NOW; ++l) kept[u][l] = factors[(p * STEP_H * FACTOR_W + (before + l) * STEP_W) * CHANNELS];
            }
            // Rows beyond the image are zeros: nothing is added, but the factors above were moved on for the next row.
            if (p >= taps + ROWS - 1 || at < 0 || at >= height) continue;
            float values[VALUES];
#pragma unroll
            for (int v = 0; v < VALUES; ++v) values[v] = source[p * B_H * PITCH + place_of(before * B_W + v * GRID) * CHANNELS];
#pragma unroll
            for (int i = 0; i < ROWS; ++i) {
                if ((unsigned int)(p - i) >= (unsigned int)taps) continue;
#pragma unroll
                for (int l = 0; l < TAPS_NOW; ++l)
#pragma unroll
                    for (int r = 0; r < RUN; ++r)
                        // Row i of the thread's results is i rows of factors behind, which were loaded i rows of the
                        // source before: a ring of ROWS rows.
                        sums[i][r] = fmaf(values[(r * SHIFT + l * B_W) / GRID], kept[(u - i + ROWS) % ROWS][l], sums[i][r]);
            }
        }
    }
}

// The same of all columns.
template <int COLUMNS>
__device__ __forceinline__ void add_all(float (&sums)[ROWS][RUN], const float *source, const float *factors, int taps, int line,
                                        int height) {
    if constexpr (COLUMNS > 0) {
        constexpr int PARTS = (COLUMNS + MAX_TAPS - 1) / MAX_TAPS, EACH = (COLUMNS + PARTS - 1) / PARTS;
        constexpr int REST = COLUMNS - (PARTS - 1) * EACH;
        constexpr int WHOLE = REST == EACH ? PARTS : PARTS - 1;
#pragma unroll(EXTRA == 0 ? 1 : WHOLE)
        for (int part = 0; part < WHOLE; ++part) add_columns<EACH>(sums, source, factors, part * EACH, taps, line, height);
        if constexpr (REST != EACH) add_columns<REST>(sums, source, factors, WHOLE * EACH, taps, line, height);
    }
}

// The sum of what the threads that share a result have, for the first of them; all threads must call it.
__device__ __forceinline__ void add_shares(float (&sums)[ROWS][RUN], float *shared, int split) {
    constexpr int OWN = THREADS / SPLIT;
    // The sums take the place of the source in shared memory; other threads may still read it.
    __syncthreads();
#pragma unroll
    for (int i = 0; i < ROWS * RUN; ++i) shared[i * THREADS + threadIdx.x] = sums[i / RUN][i % RUN];
    __syncthreads();
    if (split > 0) return;
#pragma unroll
    for (int i = 0; i < ROWS * RUN; ++i)
#pragma unroll
        for (int s = 1; s < SPLIT; ++s) sums[i / RUN][i % RUN] += shared[i * THREADS + s * OWN + threadIdx.x];
}

#define OWN_RESULTS                                                                                                        \
    const int own = threadIdx.x % CHANNELS, run = threadIdx.x / CHANNELS % RUNS;                                           \
    const int group = threadIdx.x / (CHANNELS * RUNS) % GROUPS, split = threadIdx.x / (CHANNELS * RUNS * GROUPS);          \
    const int row = group / APART_H * ROWS * APART_H + group % APART_H, column = run / APART_W * RUN * APART_W + run % APART_W;

extern __shared__ float4 shared_numbers[];

#if WEIGHTS

// parts[part][channel][result]: the sum over some pieces of the images of dy * x. Blocks: (part, tile, pack of channels), the last
// first.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
large_depthwise_weights(const STORED *x, const STORED *dy, float *parts, int channels, int packs, int tiles_h, int tiles_w, int number,
                        int height, int width, int out_h, int out_w, int pad_h, int pad_w, int result_h, int result_w, int pieces,
                        int pieces_h, int pieces_w) {
    float *const source = reinterpret_cast<float *>(shared_numbers), *const factors = source + SOURCE;
    const int tile = blockIdx.x / packs % (tiles_h * tiles_w), part = blockIdx.x / packs / (tiles_h * tiles_w);
    const int first_channel = blockIdx.x % packs * CHANNELS, top = tile / tiles_w * TILE_H, left = tile % tiles_w * TILE_W;
    OWN_RESULTS
    float sums[ROWS][RUN] = {};
    for (int piece = part; piece < pieces; piece += number) {
        const int across = piece % pieces_w, down = piece / pieces_w % pieces_h, n = piece / (pieces_w * pieces_h);
        // The last piece begins where it has all its columns; those that it shares with the one before are zeros here.
        const int first_i = down * FACTOR_H, lowest = across * FACTOR_W, first_j = min(lowest, out_w - FACTOR_W);
        const int origin_h = top * A_H + first_i * B_H - pad_h, origin_w = left * A_W + first_j * B_W - pad_w;
        __syncthreads();
        load_tile<SOURCE_H, SOURCE_W, true>(source, x + (size_t)n * height * width * channels, origin_h, origin_w, 0, height, width,
                                            channels, first_channel);
        load_tile<FACTOR_H, FACTOR_W, false>(factors, dy + (size_t)n * out_h * out_w * channels, first_i, first_j, lowest, out_h,
                                             out_w, channels, first_channel);
        __syncthreads();
        if (top + row >= result_h || left + column >= result_w) continue;
        const float *const from = source + row * A_H * PITCH + place_of(column * A_W) * CHANNELS + own;
        add_all<TAPS>(sums, from, factors + own, min(FACTOR_H, out_h - first_i), origin_h + row * A_H, height);
    }
    if (first_channel + own >= channels) return;
    float *const to = parts + ((size_t)part * channels + first_channel + own) * result_h * result_w;
#pragma unroll
    for (int i = 0; i < ROWS; ++i)
#pragma unroll
        for (int r = 0; r < RUN; ++r) {
            const int y = top + row + i * APART_H, at = left + column + r * APART_W;
            if (y < result_h && at < result_w) to[y * result_w + at] = sums[i][r];
        }
}

#else

// Blocks: (image, tile, pack of channels), the last first, and those that share the residues down. `origin`: the source's pixel for the
// first result. Result i of residue f is row i * NUMBER_H + f.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
large_depthwise(const STORED *images, const STORED *weights, const float *bias, STORED *results, int channels, int packs, int tiles_h,
                int tiles_w, int height, int width, int result_h, int result_w, int origin_h, int origin_w) {
    float *const source = reinterpret_cast<float *>(shared_numbers), *const factors = source + SOURCE;
    constexpr int AREA = FACTOR_H * FACTOR_W;
    const int tile = blockIdx.x / packs % (tiles_h * tiles_w), n = blockIdx.x / packs / (tiles_h * tiles_w);
    const int first_channel = blockIdx.x % packs * CHANNELS, top = tile / tiles_w * TILE_H, left = tile % tiles_w * TILE_W;
    const int first_h = origin_h + top * A_H, first_w = origin_w + left * A_W;
    load_tile<SOURCE_H, SOURCE_W, true>(source, images + (size_t)n * height * width * channels, first_h, first_w, 0, height, width,
                                        channels, first_channel);
    const int there = min(CHANNELS, channels - first_channel) * AREA;
#pragma unroll 8
    for (int i = threadIdx.x; i < AREA * CHANNELS; i += THREADS) {
        const int c = i / AREA, k = i - c * AREA;
        const float weight = to_float(weights[(size_t)first_channel * AREA + min(i, there - 1)]);
        factors[k * CHANNELS + c] = i < there ? weight : 0.0f;
    }
    __syncthreads();
    OWN_RESULTS
    const int channel = first_channel + own;
    if (SPLIT == 1 && channel >= channels) return;
    const float shift = BIAS && channel < channels ? bias[channel] : 0.0f;
#pragma unroll 1
    for (int f = blockIdx.y; f < NUMBER_H; f += gridDim.y)
#pragma unroll 1
        for (int g = 0; g < NUMBER_W; ++g) {
            const Residue down = residues_h[f], across = residues_w[g];
            const bool wanted = (top + row) * NUMBER_H + f < result_h && (left + column) * NUMBER_W + g < result_w;
            if (SPLIT == 1 && !wanted) continue;
            const int own_h = row * A_H + down.offset, own_w = place_of(column * A_W) + across.offset;
            const float *const from = source + own_h * PITCH + own_w * CHANNELS + own;
            const float *const window = factors + (down.first * FACTOR_W + across.first) * CHANNELS + own;
            float sums[ROWS][RUN] = {};
            if constexpr (SPLIT > 1) {
                constexpr int EACH = (FACTOR_H + SPLIT - 1) / SPLIT;
                const int before = split * EACH, taps = min(EACH, FACTOR_H - before);
                const float *const own_window = window + before * STEP_H * FACTOR_W * CHANNELS;
                add_all<TAPS>(sums, from + before * B_H * PITCH, own_window, wanted && taps > 0 ? taps : -ROWS,
                              first_h + own_h + before * B_H, height);
                add_shares(sums, source, split);
                if (split > 0 || channel >= channels) return;
            } else if (across.taps == TAPS) {
                add_all<TAPS>(sums, from, window, down.taps, first_h + own_h, height);
            } else if (NUMBER_W > 1 && across.taps == TAPS - 1) {
                add_all<(NUMBER_W > 1 ? TAPS - 1 : 0)>(sums, from, window, down.taps, first_h + own_h, height);
            }
#pragma unroll
            for (int i = 0; i < ROWS; ++i)
#pragma unroll
                for (int r = 0; r < RUN; ++r) {
                    const int y = (top + row + i * APART_H) * NUMBER_H + f, at = (left + column + r * APART_W) * NUMBER_W + g;
                    if (y >= result_h || at >= result_w) continue;
                    const float sum = sums[i][r] + shift;
                    results[(((size_t)n * result_h + y) * result_w + at) * channels + channel] =
                        Rounded<STORED>::one(RELU ? larger_of(sum, 0.0f) : sum);
                }
        }
}

#endif

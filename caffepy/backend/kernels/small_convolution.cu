// Convolutions of a size at which a launch costs as much as the arithmetic: every block holds a piece of the image and its
// share of the weights in shared memory, rounded to TF32, and reads its windows from there. Needs compute capability 8.0.
//
// The text before this file defines the type Element (of the blobs) and the constants
//   HEIGHT, WIDTH, CHANNELS               of the image that windows move over (x; dy for a gradient to data),
//   OUT_HEIGHT, OUT_WIDTH, OUTPUTS        of what has one place for each window (y; dx),
//   KERNEL_H, KERNEL_W, STRIDE_H, STRIDE_W, PAD_H, PAD_W, DILATION_H, DILATION_W, FLIPPED   how they move; FLIPPED: the
//                                         weights are read as a gradient to data needs them,
//   IMAGES, ROWS                          what a block takes at once: rows of `out` of so many images,
//   PIXEL                                 distance of two pixels in shared memory, at least CHANNELS,
//   TILES_M, TILES_N, WARPS_M, WARPS_N, WARPS_K   tiles of 16 x 8 that a warp adds up, and how warps divide the work,
//   PITCH                                 distance of two rows in shared memory: of the weights; of dy.

constexpr int THREADS = 32 * WARPS_M * WARPS_N * WARPS_K;
constexpr int PLACES = IMAGES * ROWS * OUT_WIDTH;
constexpr int ROW_TILES = (OUT_HEIGHT + ROWS - 1) / ROWS;
constexpr int PATCH_H = (ROWS - 1) * STRIDE_H + (KERNEL_H - 1) * DILATION_H + 1;
constexpr int PATCH_W = (OUT_WIDTH - 1) * STRIDE_W + (KERNEL_W - 1) * DILATION_W + 1;
constexpr int PATCH = (IMAGES * PATCH_H * PATCH_W * PIXEL + 3) / 4 * 4;
constexpr int DEPTH = KERNEL_H * KERNEL_W * CHANNELS;

__device__ __forceinline__ unsigned int tf32(float x) {
    unsigned int result;
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(result) : "f"(x));
    return result;
}

__device__ __forceinline__ void multiply_add(float (&sum)[4], const unsigned int (&a)[4], const unsigned int (&b)[2]) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// The largest power of two up to 4 that divides a number of elements.
__device__ constexpr int width_for(int elements) {
    int width = 4;
    while (elements % width != 0) width /= 2;
    return width;
}

// Where the window of a place begins in the patch.
__device__ __forceinline__ int window_of(int place) {
    const int x = place % OUT_WIDTH, row = place / OUT_WIDTH;
    return ((row / ROWS * PATCH_H + row % ROWS * STRIDE_H) * PATCH_W + x * STRIDE_W) * PIXEL;
}

// Where element k of a window (row, column, channel) lies from the window's beginning.
__device__ __forceinline__ int element_of(int k) {
    const int tap = k / CHANNELS;
    return k < DEPTH ? (tap / KERNEL_W * DILATION_H * PATCH_W + tap % KERNEL_W * DILATION_W) * PIXEL + k % CHANNELS : 0;
}

// Copies COUNT packs of V elements, rounded to TF32, many loads before the first store. `from(i)` is where pack i lies, or null
// for zeros; `to(i)` where it goes.
template <int COUNT, int V, typename From, typename To>
__device__ __forceinline__ void copy_rounded(From from, To to) {
    constexpr int TOGETHER = 8;
    for (int start = threadIdx.x; start < COUNT; start += THREADS * TOGETHER) {
        Pack<float, V> values[TOGETHER];
#pragma unroll
        for (int u = 0; u < TOGETHER; ++u) {
            const int i = start + u * THREADS;
            const Element *const source = i < COUNT ? from(i) : nullptr;
            values[u] = source ? load<V>(source, 0) : Pack<float, V>{};
        }
#pragma unroll
        for (int u = 0; u < TOGETHER; ++u) {
            const int i = start + u * THREADS;
            if (i >= COUNT) break;
            alignas(16) Pack<unsigned int, V> words;
#pragma unroll
            for (int v = 0; v < V; ++v) words[v] = tf32(values[u][v]);
            move_bytes<4 * V>(to(i), &words);
        }
    }
}

// The part of the images under ROWS rows of windows, 0 outside.
__device__ __forceinline__ void load_patch(const Element *image, unsigned int *patch, int first_image, int images, int row) {
    constexpr int V = width_for(CHANNELS), PACKS = CHANNELS / V;
    static_assert(PIXEL % V == 0, "a pixel's packs must be aligned");
    copy_rounded<IMAGES * PATCH_H * PATCH_W * PACKS, V>(
        [=](int i) -> const Element * {
            const int pixel = i / PACKS, n = first_image + pixel / (PATCH_H * PATCH_W);
            const int y = row * STRIDE_H - PAD_H + pixel / PATCH_W % PATCH_H, x = pixel % PATCH_W - PAD_W;
            const bool inside = n < images && y >= 0 && y < HEIGHT && x >= 0 && x < WIDTH;
            return inside ? image + ((size_t)(n * HEIGHT + y) * WIDTH + x) * CHANNELS + i % PACKS * V : nullptr;
        },
        [=](int i) { return patch + i / PACKS * PIXEL + i % PACKS * V; });
}

#ifdef GATHER

constexpr int STEPS = (DEPTH + 7) / 8;
constexpr int COLUMNS = TILES_N * 8;
static_assert(WARPS_N == 1, "a warp takes all columns");

// factors[n][k]: what element k of a window is multiplied by for output n.
__device__ __forceinline__ void load_factors(const Element *weights, unsigned int *factors, int first) {
    if constexpr (FLIPPED != 0) {
        constexpr int TAPS = KERNEL_H * KERNEL_W;
        copy_rounded<DEPTH * COLUMNS, 1>(
            [=](int i) -> const Element * {
                const int n = first + i % COLUMNS;
                return n < OUTPUTS ? weights + (size_t)(i / COLUMNS) * OUTPUTS + n : nullptr;
            },
            [=](int i) {
                const int tap = i / COLUMNS % TAPS, c = i / COLUMNS / TAPS;
                return factors + i % COLUMNS * PITCH + (TAPS - 1 - tap) * CHANNELS + c;
            });
    } else {
        constexpr int V = width_for(DEPTH), PACKS = DEPTH / V;
        copy_rounded<PACKS * COLUMNS, V>(
            [=](int i) -> const Element * {
                const int n = first + i / PACKS;
                return n < OUTPUTS ? weights + (size_t)n * DEPTH + i % PACKS * V : nullptr;
            },
            [=](int i) { return factors + i / PACKS * PITCH + i % PACKS * V; });
    }
    constexpr int REST = STEPS * 8 - DEPTH;
    for (int i = threadIdx.x; i < REST * COLUMNS; i += THREADS) factors[i % COLUMNS * PITCH + DEPTH + i / COLUMNS] = 0u;
}

// out = image * weights (+ bias), or max(that, 0). Blocks: (pieces of the images, tiles of COLUMNS outputs).
extern "C" __global__ void __launch_bounds__(THREADS)
gather(const Element *image, const Element *weights, const float *bias, Element *out, int images, int with_bias, int relu) {
    extern __shared__ uint4 shared_words[];
    unsigned int *const patch = reinterpret_cast<unsigned int *>(shared_words);
    unsigned int *const factors = patch + PATCH;
    int *const elements = reinterpret_cast<int *>(factors + COLUMNS * PITCH);
    const int first_image = blockIdx.x / ROW_TILES * IMAGES, row = blockIdx.x % ROW_TILES * ROWS;
    const int first_output = blockIdx.y * COLUMNS;
    load_patch(image, patch, first_image, images, row);
    load_factors(weights, factors, first_output);
    for (int k = threadIdx.x; k < STEPS * 8; k += THREADS) elements[k] = element_of(k);
    __syncthreads();

    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = threadIdx.x / 32;
    const int warp_m = warp % WARPS_M, warp_k = warp / WARPS_M;
    int windows[TILES_M][2];
#pragma unroll
    for (int i = 0; i < TILES_M; ++i) {
        const int place = (warp_m * TILES_M + i) * 16 + g;
        windows[i][0] = window_of(min(place, PLACES - 1));
        windows[i][1] = window_of(min(place + 8, PLACES - 1));
    }
    float sums[TILES_M][TILES_N][4] = {};
#pragma unroll 2
    for (int step = warp_k; step < STEPS; step += WARPS_K) {
        const int k = step * 8 + t, low = elements[k], high = elements[k + 4];
        unsigned int a[TILES_M][4];
#pragma unroll
        for (int i = 0; i < TILES_M; ++i) {
            a[i][0] = patch[windows[i][0] + low];
            a[i][1] = patch[windows[i][1] + low];
            a[i][2] = patch[windows[i][0] + high];
            a[i][3] = patch[windows[i][1] + high];
        }
#pragma unroll
        for (int j = 0; j < TILES_N; ++j) {
            const unsigned int *const column = factors + (j * 8 + g) * PITCH + k;
            const unsigned int b[2] = {column[0], column[4]};
#pragma unroll
            for (int i = 0; i < TILES_M; ++i) multiply_add(sums[i][j], a[i], b);
        }
    }

    // The warps' sums, by parts of the depth, in the memory of patch and weights.
    constexpr int PADDED = WARPS_M * TILES_M * 16;
    float *const parts = reinterpret_cast<float *>(shared_words);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < TILES_M; ++i) {
#pragma unroll
        for (int j = 0; j < TILES_N; ++j) {
            float *const to = parts + ((warp_k * PADDED + (warp_m * TILES_M + i) * 16 + g) * COLUMNS + j * 8 + 2 * t);
            *reinterpret_cast<float2 *>(to) = make_float2(sums[i][j][0], sums[i][j][1]);
            *reinterpret_cast<float2 *>(to + 8 * COLUMNS) = make_float2(sums[i][j][2], sums[i][j][3]);
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < PLACES * COLUMNS; i += THREADS) {
        const int n = i % COLUMNS, place = i / COLUMNS;
        const int at = place / OUT_WIDTH, own = first_image + at / ROWS, y = row + at % ROWS;
        if (first_output + n >= OUTPUTS || own >= images || y >= OUT_HEIGHT) continue;
        float sum = parts[i];
#pragma unroll
        for (int k = 1; k < WARPS_K; ++k) sum += parts[k * PADDED * COLUMNS + i];
        if (with_bias) sum += bias[first_output + n];
        if (relu) sum = fmaxf(sum, 0.0f);
        const size_t pixel = (size_t)(own * OUT_HEIGHT + y) * OUT_WIDTH + place % OUT_WIDTH;
        out[pixel * OUTPUTS + first_output + n] = Rounded<Element>::one(sum);
    }
}

#else

constexpr int STEPS = (PLACES + 7) / 8;
constexpr int OWN_OUTPUTS = TILES_M * 16;
constexpr int COLUMNS = WARPS_N * TILES_N * 8;
static_assert(WARPS_M == 1, "a warp takes all of the block's outputs");

// gradient[place][output] in shared memory, 0 where there is none.
__device__ __forceinline__ void load_gradient(const Element *dy, unsigned int *gradient, int first, int first_image, int images,
                                              int row) {
    constexpr int V = width_for(OUTPUTS), PACKS = OWN_OUTPUTS / V;
    copy_rounded<STEPS * 8 * PACKS, V>(
        [=](int i) -> const Element * {
            const int o = first + i % PACKS * V, place = i / PACKS;
            const int at = place / OUT_WIDTH, n = first_image + at / ROWS, y = row + at % ROWS;
            const bool inside = place < PLACES && o < OUTPUTS && n < images && y < OUT_HEIGHT;
            return inside ? dy + ((size_t)(n * OUT_HEIGHT + y) * OUT_WIDTH + place % OUT_WIDTH) * OUTPUTS + o : nullptr;
        },
        [=](int i) { return gradient + i / PACKS * PITCH + i % PACKS * V; });
}

// parts[block x][output][k] = sum over the places of some pieces of dy * the window's element k.
// Blocks: (sums of their own, tiles of COLUMNS elements, tiles of OWN_OUTPUTS outputs).
extern "C" __global__ void __launch_bounds__(THREADS)
weights(const Element *image, const Element *dy, float *parts, int images, int pieces) {
    extern __shared__ uint4 shared_words[];
    unsigned int *const patch = reinterpret_cast<unsigned int *>(shared_words);
    unsigned int *const gradient = patch + PATCH;
    int *const places = reinterpret_cast<int *>(gradient + STEPS * 8 * PITCH);
    const int first_output = blockIdx.z * OWN_OUTPUTS;
    for (int i = threadIdx.x; i < STEPS * 8; i += THREADS) places[i] = window_of(min(i, PLACES - 1));

    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = threadIdx.x / 32;
    const int warp_n = warp % WARPS_N, warp_k = warp / WARPS_N;
    const int first_column = blockIdx.y * COLUMNS + warp_n * TILES_N * 8;
    int elements[TILES_N];
#pragma unroll
    for (int j = 0; j < TILES_N; ++j) elements[j] = element_of(first_column + j * 8 + g);
    float sums[TILES_M][TILES_N][4] = {};
    for (int piece = blockIdx.x; piece < pieces; piece += gridDim.x) {
        const int first_image = piece / ROW_TILES * IMAGES, row = piece % ROW_TILES * ROWS;
        __syncthreads();
        load_patch(image, patch, first_image, images, row);
        load_gradient(dy, gradient, first_output, first_image, images, row);
        __syncthreads();
#pragma unroll 2
        for (int step = warp_k; step < STEPS; step += WARPS_K) {
            const int k = step * 8 + t, low = places[k], high = places[k + 4];
            unsigned int a[TILES_M][4];
#pragma unroll
            for (int i = 0; i < TILES_M; ++i) {
                const unsigned int *const outputs = gradient + k * PITCH + i * 16 + g;
                a[i][0] = outputs[0];
                a[i][1] = outputs[8];
                a[i][2] = outputs[4 * PITCH];
                a[i][3] = outputs[4 * PITCH + 8];
            }
#pragma unroll
            for (int j = 0; j < TILES_N; ++j) {
                const unsigned int b[2] = {patch[low + elements[j]], patch[high + elements[j]]};
#pragma unroll
                for (int i = 0; i < TILES_M; ++i) multiply_add(sums[i][j], a[i], b);
            }
        }
    }

    float *const own = reinterpret_cast<float *>(shared_words);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < TILES_M; ++i) {
#pragma unroll
        for (int j = 0; j < TILES_N; ++j) {
            float *const to = own + ((warp_k * OWN_OUTPUTS + i * 16 + g) * COLUMNS + (warp_n * TILES_N + j) * 8 + 2 * t);
            *reinterpret_cast<float2 *>(to) = make_float2(sums[i][j][0], sums[i][j][1]);
            *reinterpret_cast<float2 *>(to + 8 * COLUMNS) = make_float2(sums[i][j][2], sums[i][j][3]);
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < OWN_OUTPUTS * COLUMNS; i += THREADS) {
        const int k = blockIdx.y * COLUMNS + i % COLUMNS, o = first_output + i / COLUMNS;
        if (k >= DEPTH || o >= OUTPUTS) continue;
        float sum = own[i];
#pragma unroll
        for (int w = 1; w < WARPS_K; ++w) sum += own[w * OWN_OUTPUTS * COLUMNS + i];
        parts[((size_t)blockIdx.x * OUTPUTS + o) * DEPTH + k] = sum;
    }
}

#endif

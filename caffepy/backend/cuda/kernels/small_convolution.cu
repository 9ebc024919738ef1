// Convolutions of a size at which a launch costs as much as the arithmetic: every block holds a piece of the image and its
// share of the weights in shared memory, rounded to TF32, and reads its windows from there. Needs compute capability 8.0.
//
// The text before this file defines the type Element (of the blobs) and the constants
//   HEIGHT, WIDTH, CHANNELS               of the image that windows move over (x; dy for a gradient to data),
//   OUT_HEIGHT, OUT_WIDTH, OUTPUTS        of what has one pixel for each window (y; dx),
//   KERNEL_H, KERNEL_W, STRIDE_H, STRIDE_W, PAD_H, PAD_W, DILATION_H, DILATION_W, FLIPPED   how they move; FLIPPED: the
//                                         weights are read as a gradient to data needs them,
//   IMAGES, ROWS                          what a block takes at once: rows of `out` of so many images,
//   PIXEL                                 distance of two pixels in shared memory, at least CHANNELS,
//   TILES_M, TILES_N, WARPS_M, WARPS_N, WARPS_K   tiles of 16 x 8 that a warp adds up, and how warps divide the work,
//   PITCH                                 distance of two rows in shared memory: of the weights; of dy,
//   KERNEL_ROWS                           rows of the window that a block needs: of gradients to weights perhaps not all.

constexpr int WARPS = WARPS_M * WARPS_N * WARPS_K;
constexpr int THREADS = 32 * WARPS;
constexpr int PLACES = IMAGES * ROWS * OUT_WIDTH;
constexpr int ROW_TILES = (OUT_HEIGHT + ROWS - 1) / ROWS;
constexpr int PATCH_H = (ROWS - 1) * STRIDE_H + (KERNEL_ROWS - 1) * DILATION_H + 1;
constexpr int PATCH_W = (OUT_WIDTH - 1) * STRIDE_W + (KERNEL_W - 1) * DILATION_W + 1;
constexpr int PATCH = (IMAGES * PATCH_H * PATCH_W * PIXEL + 3) / 4 * 4;
constexpr int TAPS = KERNEL_H * KERNEL_W, DEPTH = TAPS * CHANNELS;
constexpr int TILES = TILES_M * TILES_N;
constexpr int MAX_TOGETHER = 8;

__device__ constexpr int smaller(int a, int b) { return a < b ? a : b; }
__device__ constexpr int quotient_up(int a, int b) { return (a + b - 1) / b; }

// The largest power of two up to 4 that divides a number of elements.
__device__ constexpr int width_for(int elements) { return elements % 4 == 0 ? 4 : elements % 2 == 0 ? 2 : 1; }

template <int V>
__device__ __forceinline__ void store_rounded(unsigned int *to, const Pack<float, V> &values) {
    alignas(16) Pack<unsigned int, V> words;
    // Rounded once, on the way into shared memory: each number is a factor of many products.
#pragma unroll
    for (int v = 0; v < V; ++v) words[v] = tf32(values[v]);
    move_bytes<4 * V>(to, &words);
}

// Copies COUNT packs of V elements, rounded to TF32, many loads before the first store. `from(i)` is where pack i lies, or null
// for zeros; `to(i)` where it goes.
template <int COUNT, int V, typename From, typename To>
__device__ __forceinline__ void copy_rounded(From from, To to) {
    constexpr int TOGETHER = smaller(quotient_up(COUNT, THREADS), MAX_TOGETHER);
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
            if (i < COUNT) store_rounded<V>(to(i), values[u]);
        }
    }
}

// The part of the images under KERNEL_ROWS rows, the first at `top`, of ROWS rows of windows, 0 outside; a warp takes whole rows of it.
__device__ __forceinline__ void load_patch(const Element *image, unsigned int *patch, int first_image, int images, int row, int top) {
    constexpr int V = width_for(CHANNELS), PACKS = CHANNELS / V, COUNT = PATCH_W * PACKS, TRIPS = quotient_up(COUNT, 32);
    constexpr int AT_ONCE = smaller(TRIPS, MAX_TOGETHER), LINES = MAX_TOGETHER / AT_ONCE;
    static_assert(PIXEL % V == 0, "a pixel's packs must be aligned");
    const int lane = threadIdx.x % 32;
    for (int first = threadIdx.x / 32; first < IMAGES * PATCH_H; first += WARPS * LINES) {
        for (int start = lane; start < COUNT; start += 32 * AT_ONCE) {
            Pack<float, V> values[LINES][AT_ONCE];
#pragma unroll
            for (int r = 0; r < LINES; ++r) {
                const int line = first + r * WARPS, n = first_image + line / PATCH_H;
                const int y = row * STRIDE_H - PAD_H + top * DILATION_H + line % PATCH_H;
                const bool inside = line < IMAGES * PATCH_H && n < images && y >= 0 && y < HEIGHT;
                const Element *const source = image + ((long long)(n * HEIGHT + y) * WIDTH - PAD_W) * CHANNELS;
#pragma unroll
                for (int u = 0; u < AT_ONCE; ++u) {
                    const int i = start + 32 * u, x = i / PACKS - PAD_W;
                    const bool there = inside && i < COUNT && x >= 0 && x < WIDTH;
                    values[r][u] = there ? load<V>(source + i * V, 0) : Pack<float, V>{};
                }
            }
#pragma unroll
            for (int r = 0; r < LINES; ++r) {
                const int line = first + r * WARPS;
#pragma unroll
                for (int u = 0; u < AT_ONCE; ++u) {
                    const int i = start + 32 * u;
                    if (line >= IMAGES * PATCH_H || i >= COUNT) continue;
                    store_rounded<V>(patch + (line * PATCH_W + i / PACKS) * PIXEL + i % PACKS * V, values[r][u]);
                }
            }
        }
    }
}

// Where the window of a pixel begins in the patch.
__device__ __forceinline__ int window_of(int place) {
    const int x = place % OUT_WIDTH, row = place / OUT_WIDTH;
    return ((row / ROWS * PATCH_H + row % ROWS * STRIDE_H) * PATCH_W + x * STRIDE_W) * PIXEL;
}

// Where element k of a window lies from the window's beginning: they are counted as (row, column, channel), or where FLIPPED as
// (channel, last to first row, last to first column), the order of the weights in memory. The patch begins with row `top` of windows.
__device__ __forceinline__ int element_of(int k, int top = 0) {
    if (k >= DEPTH) return 0;
    const int tap = FLIPPED ? TAPS - 1 - k % TAPS : k / CHANNELS, c = FLIPPED ? k / TAPS : k % CHANNELS;
    return ((tap / KERNEL_W - top) * DILATION_H * PATCH_W + tap % KERNEL_W * DILATION_W) * PIXEL + c;
}

// How many of a block's pixels there are: fewer than PLACES at the last rows and images. They follow each other in memory.
__device__ __forceinline__ int places_there(int first_image, int images, int row) {
    return IMAGES > 1 ? min(IMAGES, images - first_image) * ROWS * OUT_WIDTH : min(ROWS, OUT_HEIGHT - row) * OUT_WIDTH;
}

// Adds up the tiles that WARPS_K warps have of the same pixels; afterwards warp number k of them has the sums of tiles k,
// k + WARPS_K, ... `group` tells apart warps of different pixels.
__device__ __forceinline__ void add_warps(float (&sums)[TILES][4], float4 *shared, int group, int groups, int warp_k) {
    const int lane = threadIdx.x % 32;
    // The sums take the place of image and weights, which slower warps may still read.
    __syncthreads();
#pragma unroll
    for (int q = 0; q < TILES; ++q) {
        const float4 own = make_float4(sums[q][0], sums[q][1], sums[q][2], sums[q][3]);
        shared[((warp_k * groups + group) * TILES + q) * 32 + lane] = own;
    }
    __syncthreads();
#pragma unroll
    for (int q = 0; q < TILES; ++q) {
        // The warps share the tiles, and each sum is made in the order of the warps.
        if (q % WARPS_K != warp_k) continue;
        float4 sum = shared[(group * TILES + q) * 32 + lane];
#pragma unroll
        for (int k = 1; k < WARPS_K; ++k) {
            const float4 more = shared[((k * groups + group) * TILES + q) * 32 + lane];
            sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
        }
        sums[q][0] = sum.x, sums[q][1] = sum.y, sums[q][2] = sum.z, sums[q][3] = sum.w;
    }
}

// Two neighbours of a line of `length` elements.
template <typename T, int LENGTH>
__device__ __forceinline__ void store_pair(T *line, int at, float first, float second) {
    if constexpr (LENGTH % 2 == 0) {
        if (at < LENGTH) store<2>(line + at, 0, Pack<float, 2>{first, second});
    } else {
        if (at < LENGTH) line[at] = Rounded<T>::one(first);
        if (at + 1 < LENGTH) line[at + 1] = Rounded<T>::one(second);
    }
}

#ifdef GATHER

constexpr int STEPS = (DEPTH + 7) / 8;
constexpr int COLUMNS = TILES_N * 8;
static_assert(WARPS_N == 1, "a warp takes all columns");

// What element k of a window is multiplied by for output n: factors[n * PITCH + k], or factors[k * PITCH + n] where FLIPPED.
__device__ __forceinline__ void load_factors(const Element *weights, unsigned int *factors, int first) {
    constexpr int REST = STEPS * 8 - DEPTH;
    if constexpr (FLIPPED != 0) {
        constexpr int V = width_for(OUTPUTS), PACKS = COLUMNS / V;
        copy_rounded<DEPTH * PACKS, V>(
            [=](int i) -> const Element * {
                const int n = first + i % PACKS * V;
                return n < OUTPUTS ? weights + i / PACKS * OUTPUTS + n : nullptr;
            },
            [=](int i) { return factors + i / PACKS * PITCH + i % PACKS * V; });
        // An instruction multiplies eight elements. Beyond the window the factors are zero; what they meet in the patch
        // is any pixel.
        for (int i = threadIdx.x; i < REST * PITCH; i += THREADS) factors[DEPTH * PITCH + i] = 0u;
    } else {
        constexpr int V = width_for(DEPTH), PACKS = DEPTH / V;
        copy_rounded<PACKS * COLUMNS, V>(
            [=](int i) -> const Element * {
                return first + i / PACKS < OUTPUTS ? weights + (size_t)first * DEPTH + i * V : nullptr;
            },
            [=](int i) { return factors + i / PACKS * PITCH + i % PACKS * V; });
        for (int i = threadIdx.x; i < REST * COLUMNS; i += THREADS) factors[i % COLUMNS * PITCH + DEPTH + i / COLUMNS] = 0u;
    }
}

// out = image * weights (+ bias), or max(that, 0). Blocks: (pieces of the images, tiles of COLUMNS outputs).
extern "C" __global__ void __launch_bounds__(THREADS)
gather(const Element *image, const Element *weights, const float *bias, Element *out, int images, int with_bias, int relu) {
    extern __shared__ uint4 shared_words[];
    unsigned int *const patch = reinterpret_cast<unsigned int *>(shared_words);
    unsigned int *const factors = patch + PATCH;
    int2 *const elements = reinterpret_cast<int2 *>(factors + (FLIPPED ? STEPS * 8 : COLUMNS) * PITCH);
    const int first_image = blockIdx.x / ROW_TILES * IMAGES, row = blockIdx.x % ROW_TILES * ROWS;
    const int first_output = blockIdx.y * COLUMNS;
    load_patch(image, patch, first_image, images, row, 0);
    load_factors(weights, factors, first_output);
    for (int i = threadIdx.x; i < STEPS * 4; i += THREADS) {
        const int k = i / 4 * 8 + i % 4;
        // Tabulated once for the block: the loop over steps then has no division.
        elements[i] = make_int2(element_of(k), element_of(k + 4));
    }
    __syncthreads();

    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = threadIdx.x / 32;
    const int warp_m = warp % WARPS_M, warp_k = warp / WARPS_M;
    const unsigned int *windows[TILES_M][2];
#pragma unroll
    for (int i = 0; i < TILES_M; ++i) {
        const int place = (warp_m * TILES_M + i) * 16 + g;
        // Rows of a tile beyond the last pixel repeat its window; they are not stored.
        windows[i][0] = patch + window_of(min(place, PLACES - 1));
        windows[i][1] = patch + window_of(min(place + 8, PLACES - 1));
    }
    const unsigned int *const column = factors + (FLIPPED ? t * PITCH + g : g * PITCH + t);
    constexpr int STEP_PITCH = FLIPPED ? 8 * PITCH : 8, TILE_PITCH = FLIPPED ? 8 : 8 * PITCH, HALF_PITCH = FLIPPED ? 4 * PITCH : 4;
    float sums[TILES][4] = {};
#pragma unroll 4
    for (int step = warp_k; step < STEPS; step += WARPS_K) {
        const int2 place = elements[step * 4 + t];
        unsigned int a[TILES_M][4];
#pragma unroll
        for (int i = 0; i < TILES_M; ++i) {
            a[i][0] = windows[i][0][place.x];
            a[i][1] = windows[i][1][place.x];
            a[i][2] = windows[i][0][place.y];
            a[i][3] = windows[i][1][place.y];
        }
#pragma unroll
        for (int j = 0; j < TILES_N; ++j) {
            const unsigned int *const factor = column + step * STEP_PITCH + j * TILE_PITCH;
            const unsigned int b[2] = {factor[0], factor[HALF_PITCH]};
#pragma unroll
            for (int i = 0; i < TILES_M; ++i) multiply_add(sums[i * TILES_N + j], a[i], b);
        }
    }
    if constexpr (WARPS_K > 1) add_warps(sums, reinterpret_cast<float4 *>(shared_words), warp_m, WARPS_M, warp_k);

    const int there = places_there(first_image, images, row);
    Element *const first_place = out + (size_t)(first_image * OUT_HEIGHT + row) * OUT_WIDTH * OUTPUTS;
#pragma unroll
    for (int j = 0; j < TILES_N; ++j) {
        const int n = first_output + j * 8 + 2 * t;
        const float low = with_bias && n < OUTPUTS ? bias[n] : 0.0f, high = with_bias && n + 1 < OUTPUTS ? bias[n + 1] : 0.0f;
#pragma unroll
        for (int i = 0; i < TILES_M; ++i) {
            const int q = i * TILES_N + j;
            if (WARPS_K > 1 && q % WARPS_K != warp_k) continue;
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int place = (warp_m * TILES_M + i) * 16 + g + 8 * h;
                const float first = sums[q][2 * h] + low, second = sums[q][2 * h + 1] + high;
                if (place >= there) continue;
                store_pair<Element, OUTPUTS>(first_place + place * OUTPUTS, n, relu ? larger_of(first, 0.0f) : first,
                                             relu ? larger_of(second, 0.0f) : second);
            }
        }
    }
}

#else

constexpr int STEPS = (PLACES + 7) / 8;
constexpr int OWN_OUTPUTS = TILES_M * 16;
constexpr int COLUMNS = WARPS_N * TILES_N * 8;
static_assert(WARPS_M == 1, "a warp takes all of the block's outputs");

// gradient[pixel][output] in shared memory, 0 for pixels that there are not.
__device__ __forceinline__ void load_gradient(const Element *dy, unsigned int *gradient, int first, int there) {
    constexpr int V = width_for(OUTPUTS), PACKS = smaller(OWN_OUTPUTS, OUTPUTS) / V;
    copy_rounded<STEPS * 8 * PACKS, V>(
        [=](int i) -> const Element * {
            const int place = i / PACKS, o = first + i % PACKS * V;
            return place < there && o < OUTPUTS ? dy + place * OUTPUTS + o : nullptr;
        },
        [=](int i) { return gradient + i / PACKS * PITCH + i % PACKS * V; });
}

// parts[block x][output][k] = sum over the pixels of some pieces of dy * the window's element k.
// Blocks: (sums of their own, tiles of COLUMNS elements, tiles of OWN_OUTPUTS outputs).
extern "C" __global__ void __launch_bounds__(THREADS)
weights(const Element *image, const Element *dy, float *parts, int images, int pieces) {
    extern __shared__ uint4 shared_words[];
    unsigned int *const patch = reinterpret_cast<unsigned int *>(shared_words);
    unsigned int *const gradient = patch + PATCH;
    int2 *const places = reinterpret_cast<int2 *>(gradient + STEPS * 8 * PITCH);
    const int first_output = blockIdx.z * OWN_OUTPUTS;
    const int top = KERNEL_ROWS < KERNEL_H ? blockIdx.y * COLUMNS / (KERNEL_W * CHANNELS) : 0;
    for (int i = threadIdx.x; i < STEPS * 4; i += THREADS) {
        const int place = i / 4 * 8 + i % 4;
        places[i] = make_int2(window_of(min(place, PLACES - 1)), window_of(min(place + 4, PLACES - 1)));
    }

    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = threadIdx.x / 32;
    const int warp_n = warp % WARPS_N, warp_k = warp / WARPS_N;
    const int first_column = blockIdx.y * COLUMNS + warp_n * TILES_N * 8;
    const unsigned int *elements[TILES_N];
#pragma unroll
    for (int j = 0; j < TILES_N; ++j) elements[j] = patch + element_of(first_column + j * 8 + g, top);
    const unsigned int *const outputs = gradient + t * PITCH + g;
    float sums[TILES][4] = {};
    // A block's pieces depend on the grid alone, so its sums have the same bits in each run.
    for (int piece = blockIdx.x; piece < pieces; piece += gridDim.x) {
        const int first_image = piece / ROW_TILES * IMAGES, row = piece % ROW_TILES * ROWS;
        __syncthreads();
        load_patch(image, patch, first_image, images, row, top);
        load_gradient(dy + (size_t)(first_image * OUT_HEIGHT + row) * OUT_WIDTH * OUTPUTS, gradient, first_output,
                      places_there(first_image, images, row));
        __syncthreads();
#pragma unroll 4
        for (int step = warp_k; step < STEPS; step += WARPS_K) {
            const int2 place = places[step * 4 + t];
            unsigned int a[TILES_M][4];
#pragma unroll
            for (int i = 0; i < TILES_M; ++i) {
                const unsigned int *const from = outputs + step * 8 * PITCH + i * 16;
                a[i][0] = from[0];
                a[i][1] = from[8];
                a[i][2] = from[4 * PITCH];
                a[i][3] = from[4 * PITCH + 8];
            }
#pragma unroll
            for (int j = 0; j < TILES_N; ++j) {
                const unsigned int b[2] = {elements[j][place.x], elements[j][place.y]};
#pragma unroll
                for (int i = 0; i < TILES_M; ++i) multiply_add(sums[i * TILES_N + j], a[i], b);
            }
        }
    }
    if constexpr (WARPS_K > 1) add_warps(sums, reinterpret_cast<float4 *>(shared_words), warp_n, WARPS_N, warp_k);

#pragma unroll
    for (int i = 0; i < TILES_M; ++i) {
#pragma unroll
        for (int j = 0; j < TILES_N; ++j) {
            const int q = i * TILES_N + j;
            if (WARPS_K > 1 && q % WARPS_K != warp_k) continue;
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int o = first_output + i * 16 + g + 8 * h;
                if (o >= OUTPUTS) continue;
                float *const line = parts + (size_t)(blockIdx.x * OUTPUTS + o) * DEPTH;
                store_pair<float, DEPTH>(line, first_column + j * 8 + 2 * t, sums[q][2 * h], sums[q][2 * h + 1]);
            }
        }
    }
}

#endif

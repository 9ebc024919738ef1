// Gradients to the weights of convolutions over one axis, where groups have few channels: a block holds what a chunk of the pixels
// of an image needs in shared memory, rounded to TF32, and its warps take turns at eight pixels. Needs compute capability 8.0.
//
// The text before this file defines the type Element and the constants OUTPUTS and CHANNELS of a group, KERNEL, STRIDE, PAD,
// DILATION, TILES_N (tiles of eight elements of a window for each block), PATCH_PITCH, the distance of two channels in shared memory,
// and TOGETHER, of how many elements loads are: it divides the lengths of x and dy.

constexpr int WARPS = 8, THREADS = 32 * WARPS, CHUNK = 128, AT_ONCE = TOGETHER == 4 ? 5 : 8;
constexpr int DEPTH = CHANNELS * KERNEL, TILES_M = (OUTPUTS + 15) / 16, TILES = TILES_M * TILES_N, LINES = TILES_M * 16;
constexpr int SPAN = (CHUNK - 1) * STRIDE + (KERNEL - 1) * DILATION + 1;
constexpr int PITCH = CHUNK + 4;  // of dy: eight outputs lie in different banks
constexpr int SHIFT = ((-PAD) % TOGETHER + TOGETHER) % TOGETHER;  // what lies before a chunk's first element, to load from aligned ones
constexpr int LOADED = (SPAN + SHIFT + TOGETHER - 1) / TOGETHER;
static_assert(PATCH_PITCH >= LOADED * TOGETHER && PATCH_PITCH % 4 == 0, "channels lie apart");

// Copies PACKS packs of TOGETHER neighbours of each of ROWS lines, many loads before the first store. from(row, i) is where pack i
// lies, or null for zeros; to(row, i) where it goes.
template <int ROWS, int PACKS, typename From, typename To>
__device__ __forceinline__ void copy_lines(From from, To to) {
    for (int first = threadIdx.x; first < ROWS * PACKS; first += THREADS * AT_ONCE) {
        Pack<float, TOGETHER> values[AT_ONCE];
#pragma unroll
        for (int u = 0; u < AT_ONCE; ++u) {
            const int i = first + u * THREADS;
            const Element *const source = i < ROWS * PACKS ? from(i / PACKS, i % PACKS * TOGETHER) : nullptr;
            values[u] = source ? load<TOGETHER>(source, 0) : Pack<float, TOGETHER>{};
        }
#pragma unroll
        for (int u = 0; u < AT_ONCE; ++u) {
            const int i = first + u * THREADS;
            Pack<unsigned int, TOGETHER> words;
#pragma unroll
            for (int v = 0; v < TOGETHER; ++v) words[v] = tf32(values[u][v]);
            if (i < ROWS * PACKS) store_raw<TOGETHER>(to(i / PACKS, i % PACKS * TOGETHER), 0, words);
        }
    }
}

// parts[block x][output][element of the window] = the sum over some chunks of dy * x. Arrays are (images, channels, length).
// Blocks: (sums of their own, groups, tiles of TILES_N * 8 elements).
extern "C" __global__ void __launch_bounds__(THREADS, 2)
line_weights(const Element *x, const Element *dy, float *parts, int images, int length, int out_length) {
    extern __shared__ uint4 shared_words[];
    unsigned int *const patch = reinterpret_cast<unsigned int *>(shared_words), *const gradient = patch + CHANNELS * PATCH_PITCH;
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = threadIdx.x / 32;
    const int group = blockIdx.y, groups = gridDim.y, first_column = blockIdx.z * (TILES_N * 8);
    const int chunks = (out_length + CHUNK - 1) / CHUNK;
    const unsigned int *elements[TILES_N];
#pragma unroll
    for (int j = 0; j < TILES_N; ++j) {
        const int n = min(first_column + j * 8 + g, DEPTH - 1);
        elements[j] = patch + SHIFT + n / KERNEL * PATCH_PITCH + n % KERNEL * DILATION;
    }
    float sums[TILES][4] = {};
    for (int piece = blockIdx.x; piece < images * chunks; piece += gridDim.x) {
        const int image = piece / chunks, start = (piece - image * chunks) * CHUNK;
        const Element *const from_x = x + (size_t)(image * groups + group) * CHANNELS * length;
        const Element *const from_dy = dy + (size_t)(image * groups + group) * OUTPUTS * out_length + start;
        const int first = start * STRIDE - PAD - SHIFT, there = min(CHUNK, out_length - start);
        __syncthreads();
        copy_lines<CHANNELS, LOADED>(
            [=](int c, int i) {
                const int at = first + i;
                return at >= 0 && at < length ? from_x + (size_t)c * length + at : nullptr;
            },
            [=](int c, int i) { return patch + c * PATCH_PITCH + i; });
        copy_lines<LINES, CHUNK / TOGETHER>(
            [=](int o, int i) { return o < OUTPUTS && i < there ? from_dy + (size_t)o * out_length + i : nullptr; },
            [=](int o, int i) { return gradient + o * PITCH + i; });
        __syncthreads();
        for (int step = warp * 8; step < there; step += WARPS * 8) {
            unsigned int a[TILES_M][4];
#pragma unroll
            for (int i = 0; i < TILES_M; ++i) {
                const unsigned int *const line = gradient + (i * 16 + g) * PITCH + step + t;
                a[i][0] = line[0];
                a[i][1] = line[8 * PITCH];
                a[i][2] = line[4];
                a[i][3] = line[8 * PITCH + 4];
            }
            // Beyond the last pixel dy is zero; what it is multiplied with must be a number that this sum has anyway, if that is NaN.
            const int low = min(step + t, there - 1) * STRIDE, high = min(step + t + 4, there - 1) * STRIDE;
#pragma unroll
            for (int j = 0; j < TILES_N; ++j) {
                const unsigned int b[2] = {elements[j][low], elements[j][high]};
#pragma unroll
                for (int i = 0; i < TILES_M; ++i) multiply_add(sums[i * TILES_N + j], a[i], b);
            }
        }
    }
    float *const total = reinterpret_cast<float *>(shared_words);
    for (int w = 0; w < WARPS; ++w) {
        __syncthreads();
        if (warp != w) continue;
#pragma unroll
        for (int q = 0; q < TILES; ++q)
#pragma unroll
            for (int r = 0; r < 4; ++r) {
                float *const at = total + (q * 4 + r) * 32 + lane;
                *at = w == 0 ? sums[q][r] : *at + sums[q][r];
            }
    }
    __syncthreads();
    float *const own = parts + (size_t)(blockIdx.x * groups + group) * OUTPUTS * DEPTH;
    for (int i = threadIdx.x; i < LINES * TILES_N * 8; i += THREADS) {
        const int o = i / (TILES_N * 8), n = i % (TILES_N * 8);
        const int q = o / 16 * TILES_N + n / 8, r = o / 8 % 2 * 2 + n % 2, from = o % 8 * 4 + n % 8 / 2;
        if (o < OUTPUTS && first_column + n < DEPTH) own[o * DEPTH + first_column + n] = total[(q * 4 + r) * 32 + from];
    }
}

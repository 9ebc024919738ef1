// Gradients to the weights of convolutions over few pixels, in halves: sums are short and results many, so that a block's time is
// what writing its results takes. A block has the whole sums of TILE_M outputs times TILE_N elements of a window. Needs compute
// capability 8.0.
//
// The text before this file defines the type Element, float16 or bfloat16, MMA_TYPE, its name in PTX, and TILE_M and TILE_N,
// multiples of 32 and of 64.

constexpr int DEPTH = 64;  // pixels at once
constexpr int WARPS_M = 2, WARPS_N = 4, THREADS = 32 * WARPS_M * WARPS_N;
constexpr int PITCH_M = TILE_M + 8, PITCH_N = TILE_N + 8;  // eight rows of a matrix that is loaded at once lie in different banks
constexpr int OWN_M = TILE_M / WARPS_M, OWN_N = TILE_N / WARPS_N, TILES_M = OWN_M / 16, PAIRS = OWN_N / 16;

// Four 8 x 8 matrices, each turned: lane 8 m + r points to row r of matrix m.
__device__ __forceinline__ void load_turned(unsigned int (&to)[4], const Element *from) {
    const unsigned int address = (unsigned int)__cvta_generic_to_shared(from);
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(address)
                 : "memory");
}

__device__ __forceinline__ void multiply_add(float (&sum)[4], const unsigned int (&a)[4], unsigned int b0, unsigned int b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32." MMA_TYPE "." MMA_TYPE
        ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// out[output][element of the window] (+)= the sum over all pixels of dy * x, for x and dy with channels last. Sizes are those of three
// axes; `outputs` and `channels` are multiples of eight. Blocks: (tiles of TILE_N elements, tiles of TILE_M outputs).
extern "C" __global__ void __launch_bounds__(THREADS)
small_k_wgrad(const Element *x, const Element *dy, float *out, int outputs, int columns, int pixels, int accumulate, int channels,
           Divider by_channels, int kernel_h, Divider by_kernel_h, int kernel_w, Divider by_kernel_w, int out_d, Divider by_out_d,
           int out_h, Divider by_out_h, int out_w, Divider by_out_w, int depth, int height, int width, int stride_d, int stride_h,
           int stride_w, int pad_d, int pad_h, int pad_w, int dilation_d, int dilation_h, int dilation_w) {
    __shared__ alignas(16) Element gradient[DEPTH * PITCH_M], windows[DEPTH * PITCH_N];
    constexpr int PACKS_M = TILE_M / 8, PACKS_N = TILE_N / 8;              // of eight elements, a load's
    constexpr int ROWS_M = THREADS / PACKS_M, ROWS_N = THREADS / PACKS_N;  // pixels that the block loads at once
    const int first_output = blockIdx.y * TILE_M, first_column = blockIdx.x * TILE_N;

    const int output = first_output + threadIdx.x % PACKS_M * 8, column = first_column + threadIdx.x % PACKS_N * 8;
    const int tap = by_channels(column), tap_line = by_kernel_w(tap), tap_d = by_kernel_h(tap_line);
    const int shift_d = tap_d * dilation_d - pad_d, shift_h = (tap_line - tap_d * kernel_h) * dilation_h - pad_h;
    const int shift_w = (tap - tap_line * kernel_w) * dilation_w - pad_w, channel = column - tap * channels;

    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, warp_m = warp % WARPS_M, warp_n = warp / WARPS_M;
    const Element *const lines = gradient + (lane / 16 * 8 + lane % 8) * PITCH_M + warp_m * OWN_M + lane / 8 % 2 * 8;
    const Element *const elements = windows + lane % 16 * PITCH_N + warp_n * OWN_N + lane / 16 * 8;
    float sums[TILES_M][PAIRS][2][4] = {};
    for (int start = 0; start < pixels; start += DEPTH) {
        // Loaded into registers first: the loads are on their way while the block still multiplies the pixels before.
        uint4 loaded_m[DEPTH / ROWS_M], loaded_n[DEPTH / ROWS_N];
#pragma unroll
        for (int u = 0; u < DEPTH / ROWS_M; ++u) {
            const int pixel = start + u * ROWS_M + threadIdx.x / PACKS_M;
            const bool there = pixel < pixels && output < outputs;
            loaded_m[u] = there ? *reinterpret_cast<const uint4 *>(dy + (size_t)pixel * outputs + output) : uint4{};
        }
#pragma unroll
        for (int u = 0; u < DEPTH / ROWS_N; ++u) {
            const int pixel = start + u * ROWS_N + threadIdx.x / PACKS_N;
            const int line = by_out_w(pixel), plane = by_out_h(line), n = by_out_d(plane);
            const int at_d = (plane - n * out_d) * stride_d + shift_d, at_h = (line - plane * out_h) * stride_h + shift_h;
            const int at_w = (pixel - line * out_w) * stride_w + shift_w;
            const bool inside = at_d >= 0 && at_d < depth && at_h >= 0 && at_h < height && at_w >= 0 && at_w < width;
            const size_t at = (((size_t)n * depth + at_d) * height + at_h) * width + at_w;
            const bool there = pixel < pixels && column < columns && inside;
            loaded_n[u] = there ? *reinterpret_cast<const uint4 *>(x + at * channels + channel) : uint4{};
        }
        // Slower warps may still read the pixels before from the shared memory.
        if (start > 0) __syncthreads();
#pragma unroll
        for (int u = 0; u < DEPTH / ROWS_M; ++u) {
            Element *const line = gradient + (u * ROWS_M + threadIdx.x / PACKS_M) * PITCH_M;
            *reinterpret_cast<uint4 *>(line + threadIdx.x % PACKS_M * 8) = loaded_m[u];
        }
        // Of sixteen elements, every second pair is multiplied with the first eight columns of an instruction, the others with the
        // second eight, so that a thread's results are four neighbours.
#pragma unroll
        for (int u = 0; u < DEPTH / ROWS_N; ++u) {
            const int pack = threadIdx.x % PACKS_N;
            Element *const line = windows + (u * ROWS_N + threadIdx.x / PACKS_N) * PITCH_N + pack / 2 * 16 + pack % 2 * 4;
            *reinterpret_cast<uint2 *>(line) = make_uint2(loaded_n[u].x, loaded_n[u].z);
            *reinterpret_cast<uint2 *>(line + 8) = make_uint2(loaded_n[u].y, loaded_n[u].w);
        }
        __syncthreads();
#pragma unroll
        for (int step = 0; step < DEPTH; step += 16) {
            // The other steps would multiply zeros.
            if (start + step >= pixels) break;
            unsigned int a[TILES_M][4], b[PAIRS][4];
#pragma unroll
            for (int i = 0; i < TILES_M; ++i) load_turned(a[i], lines + step * PITCH_M + i * 16);
#pragma unroll
            for (int j = 0; j < PAIRS; ++j) load_turned(b[j], elements + step * PITCH_N + j * 16);
#pragma unroll
            for (int i = 0; i < TILES_M; ++i)
#pragma unroll
                for (int j = 0; j < PAIRS; ++j)
#pragma unroll
                    for (int k = 0; k < 2; ++k) multiply_add(sums[i][j][k], a[i], b[j][2 * k], b[j][2 * k + 1]);
        }
    }
#pragma unroll
    for (int i = 0; i < TILES_M; ++i)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int row = first_output + warp_m * OWN_M + i * 16 + lane / 4 + 8 * h;
#pragma unroll
            for (int j = 0; j < PAIRS; ++j) {
                const int at = first_column + warp_n * OWN_N + j * 16 + lane % 4 * 4;
                if (row >= outputs || at >= columns) continue;
                float4 *const to = reinterpret_cast<float4 *>(out + (size_t)row * columns + at);
                const float4 before = accumulate ? *to : float4{};
                *to = make_float4(before.x + sums[i][j][0][2 * h], before.y + sums[i][j][0][2 * h + 1],
                                  before.z + sums[i][j][1][2 * h], before.w + sums[i][j][1][2 * h + 1]);
            }
        }
}

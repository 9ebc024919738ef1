// Products of matrices so small that a block for each 16 x (8 TILES) of the result, its warps dividing the depth among them, is
// enough. Factors are rounded to TF32 on their way from memory. Needs compute capability 8.0.
//
// The text before this file defines the types In and Out and the constants TILES, WARPS, and A_DEPTH_FIRST, B_DEPTH_FIRST: whether
// neighbours in memory of a factor are neighbours along the depth.

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

// Element (line, k) of a factor whose lines have so many elements in memory, 0 beyond its edges.
template <bool DEPTH_FIRST>
__device__ __forceinline__ float element(const In *factor, int line, int k, int lines, int depth, int pitch) {
    if (line >= lines || k >= depth) return 0.0f;
    return to_float(factor[DEPTH_FIRST ? (size_t)line * pitch + k : (size_t)k * pitch + line]);
}

// out (+)= a * b: a is (rows, depth), b (depth, columns), out (rows, columns) with any strides. Blocks: (row tiles, column tiles).
extern "C" __global__ void __launch_bounds__(32 * WARPS)
product(const In *a, const In *b, Out *out, int rows, int columns, int depth, int a_pitch, int b_pitch, int out_row, int out_column,
        int accumulate) {
    constexpr int AT_ONCE = 4;
    __shared__ float parts[WARPS][16][TILES * 8 + 2];
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = threadIdx.x / 32;
    const int row = blockIdx.x * 16, column = blockIdx.y * (TILES * 8);
    float sums[TILES][4] = {};
    for (int start = warp * 8 * AT_ONCE; start < depth; start += WARPS * 8 * AT_ONCE) {
        float left[AT_ONCE][4], right[AT_ONCE][TILES][2];
#pragma unroll
        for (int s = 0; s < AT_ONCE; ++s) {
            const int k = start + s * 8 + t;
            left[s][0] = element<A_DEPTH_FIRST>(a, row + g, k, rows, depth, a_pitch);
            left[s][1] = element<A_DEPTH_FIRST>(a, row + g + 8, k, rows, depth, a_pitch);
            left[s][2] = element<A_DEPTH_FIRST>(a, row + g, k + 4, rows, depth, a_pitch);
            left[s][3] = element<A_DEPTH_FIRST>(a, row + g + 8, k + 4, rows, depth, a_pitch);
#pragma unroll
            for (int j = 0; j < TILES; ++j) {
                right[s][j][0] = element<B_DEPTH_FIRST>(b, column + j * 8 + g, k, columns, depth, b_pitch);
                right[s][j][1] = element<B_DEPTH_FIRST>(b, column + j * 8 + g, k + 4, columns, depth, b_pitch);
            }
        }
#pragma unroll
        for (int s = 0; s < AT_ONCE; ++s) {
            const unsigned int x[4] = {tf32(left[s][0]), tf32(left[s][1]), tf32(left[s][2]), tf32(left[s][3])};
#pragma unroll
            for (int j = 0; j < TILES; ++j) {
                const unsigned int y[2] = {tf32(right[s][j][0]), tf32(right[s][j][1])};
                multiply_add(sums[j], x, y);
            }
        }
    }
#pragma unroll
    for (int j = 0; j < TILES; ++j) {
        parts[warp][g][j * 8 + 2 * t] = sums[j][0];
        parts[warp][g][j * 8 + 2 * t + 1] = sums[j][1];
        parts[warp][g + 8][j * 8 + 2 * t] = sums[j][2];
        parts[warp][g + 8][j * 8 + 2 * t + 1] = sums[j][3];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < 16 * TILES * 8; i += 32 * WARPS) {
        const int y = i / (TILES * 8), x = i % (TILES * 8);
        if (row + y >= rows || column + x >= columns) continue;
        float sum = parts[0][y][x];
#pragma unroll
        for (int w = 1; w < WARPS; ++w) sum += parts[w][y][x];
        Out *const to = out + (size_t)(row + y) * out_row + (size_t)(column + x) * out_column;
        *to = Rounded<Out>::one(accumulate ? to_float(*to) + sum : sum);
    }
}

// Products of matrices so small that a block for each 16 x (8 TILES) of the result, its warps dividing the depth among them, is
// enough. Factors are rounded to TF32 on their way from memory. Needs compute capability 8.0.
//
// The text before this file defines the types In and Out and the constants TILES, WARPS, A_DEPTH_FIRST, B_DEPTH_FIRST (whether
// neighbours in memory of a factor are neighbours along the depth) and A_VECTORS, B_VECTORS (whether four of them can be loaded at
// once everywhere). With FORMULA, formula_(sum, channel of the column, result) stands there too, and out is its result.

// Elements (line, k) to (line, k + 7) of a factor whose lines have so many elements in memory, 0 beyond its edges.
template <bool DEPTH_FIRST, bool VECTORS>
__device__ __forceinline__ void load_eight(float (&to)[8], const In *factor, int line, int k, int lines, int depth, int pitch) {
#pragma unroll
    for (int v = 0; v < 8; v += VECTORS ? 4 : 1) {
        const bool inside = line < lines && k + v < depth;
        if constexpr (VECTORS) {
            const Pack<float, 4> values = inside ? load<4>(factor + (size_t)line * pitch + k + v, 0) : Pack<float, 4>{};
            to[v] = values[0], to[v + 1] = values[1], to[v + 2] = values[2], to[v + 3] = values[3];
        } else {
            const size_t at = DEPTH_FIRST ? (size_t)line * pitch + k + v : (size_t)(k + v) * pitch + line;
            to[v] = inside ? to_float(factor[at]) : 0.0f;
        }
    }
}

// out (+)= a * b: a is (rows, depth), b (depth, columns), out (rows, columns) with any strides. Blocks: (row tiles, column tiles).
// A warp takes 32 of the depth at a time, eight neighbours a lane: which of them go into one instruction does not matter to a sum.
extern "C" __global__ void __launch_bounds__(32 * WARPS)
product(const In *a, const In *b, Out *out, int rows, int columns, int depth, int a_pitch, int b_pitch, int out_row, int out_column,
        int accumulate
#ifdef FORMULA
        , const float *channel
#endif
) {
    __shared__ float parts[WARPS][16][TILES * 8 + 2];
    const int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, warp = threadIdx.x / 32;
    const int row = blockIdx.x * 16, column = blockIdx.y * (TILES * 8);
    float sums[TILES][4] = {};
    for (int start = warp * 32; start < depth; start += WARPS * 32) {
        float left[2][8], right[TILES][8];
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            load_eight<A_DEPTH_FIRST, A_VECTORS>(left[h], a, row + g + 8 * h, start + t * 8, rows, depth, a_pitch);
        }
#pragma unroll
        for (int j = 0; j < TILES; ++j) {
            load_eight<B_DEPTH_FIRST, B_VECTORS>(right[j], b, column + j * 8 + g, start + t * 8, columns, depth, b_pitch);
        }
#pragma unroll
        for (int s = 0; s < 8; s += 2) {
            const unsigned int x[4] = {tf32(left[0][s]), tf32(left[1][s]), tf32(left[0][s + 1]), tf32(left[1][s + 1])};
#pragma unroll
            for (int j = 0; j < TILES; ++j) {
                const unsigned int y[2] = {tf32(right[j][s]), tf32(right[j][s + 1])};
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
        // The warps' parts in their order: the same bits in each run.
        float sum = parts[0][y][x];
#pragma unroll
        for (int w = 1; w < WARPS; ++w) sum += parts[w][y][x];
        Out *const to = out + (size_t)(row + y) * out_row + (size_t)(column + x) * out_column;
#ifdef FORMULA
        float result;
        formula_(sum, channel[column + x], result);
        *to = Rounded<Out>::one(result);
#else
        *to = Rounded<Out>::one(accumulate ? to_float(*to) + sum : sum);
#endif
    }
}

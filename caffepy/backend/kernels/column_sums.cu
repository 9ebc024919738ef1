// Two sums for each channel over all rows, in one launch; put after columns.cu and before the kernels that need sums.
//
// Each block adds up its tiles and leaves two numbers a column in `partial`, (splits, columns). The block of a column
// block that is last to finish adds those of all. Every sum is made in an order that depends on the shape alone.

// Columns of a block at most, as cuda_normalise.py cuts arrays.
constexpr int MOST_COLUMNS = 32 * V;

// Memory for both trees.
constexpr int SHARED_DOUBLES = (V > 2 ? V : 2) * THREADS / 2;

// Adds up both values of equal `slot` over part = 0 .. parts - 1, which need not be a power of two. Results are in part 0.
template <typename A, int N>
__device__ __forceinline__ void add_parts(A (&first)[N], A (&second)[N], unsigned int part, unsigned int parts,
                                          unsigned int slot, unsigned int width, A *shared) {
    while (parts > 1) {
        const unsigned int half = (parts + 1) / 2;
        __syncthreads();
        if (part >= half && part < parts) {
            A *to = shared + (part - half) * width + slot;
#pragma unroll
            for (int j = 0; j < N; ++j) {
                to[2 * j * (THREADS / 2)] = first[j];
                to[(2 * j + 1) * (THREADS / 2)] = second[j];
            }
        }
        __syncthreads();
        if (part + half < parts) {
            const A *from = shared + part * width + slot;
#pragma unroll
            for (int j = 0; j < N; ++j) {
                first[j] += from[2 * j * (THREADS / 2)];
                second[j] += from[(2 * j + 1) * (THREADS / 2)];
            }
        }
        parts = half;
    }
}

// Adds up over the rows of a block; the results are in threads with threadIdx.y == 0.
__device__ __forceinline__ void add_rows(float (&first)[V], float (&second)[V], double *shared) {
    add_parts<float, V>(first, second, threadIdx.y, blockDim.y, threadIdx.x, blockDim.x,
                        reinterpret_cast<float *>(shared));
}

// How many rows the blocks with blockIdx.y == split have: from 1 to strips * blockDim.y.
__device__ __forceinline__ unsigned int rows_of(unsigned int split, unsigned int rows) {
    const unsigned int down = blockDim.y, strips = (rows + down - 1) / down;
    const unsigned int each = strips / gridDim.y, more = strips % gridDim.y;
    const unsigned int last = more ? more - 1 : gridDim.y - 1;
    return (each + (split < more)) * down - (split == last ? strips * down - rows : 0);
}

// Leaves the block's sums, which are in threads with threadIdx.y == 0, in `partial`; whether all blocks of this column
// block have. The tickets are 0 again afterwards.
__device__ __forceinline__ bool leave_sums(const float (&first)[V], const float (&second)[V], float2 *partial,
                                           unsigned int *tickets, unsigned int columns) {
    __shared__ unsigned int ticket;
    const unsigned int column = own_column();
    if (threadIdx.y == 0 && column < columns) {
#pragma unroll
        for (int j = 0; j < V; ++j)
            partial[(size_t)blockIdx.y * columns + column + j] = make_float2(first[j], second[j]);
    }
    __syncthreads();
    if (gridDim.y == 1) return true;
    if (own_thread() == 0) {
        __threadfence();
        ticket = atomicInc(tickets + blockIdx.x, gridDim.y - 1);
        __threadfence();
    }
    __syncthreads();
    return ticket == gridDim.y - 1;
}

// For each column of the block: add(value of a split, split, sums...) over the splits, then finish(column, its number
// within the block, sums...).
template <typename Add, typename Finish>
__device__ __forceinline__ void add_splits(const float2 *partial, unsigned int columns, double *shared, Add add,
                                           Finish finish) {
    const unsigned int start = blockIdx.x * blockDim.x * V, width = min(blockDim.x * V, columns - start);
    const unsigned int slot = own_thread() % width, part = own_thread() / width;
    const unsigned int parts = min(blockDim.x * blockDim.y / width, gridDim.y);
    double first[1] = {0.0}, second[1] = {0.0};
    partial += start + slot;
    if (part < parts) {
#pragma unroll 8
        for (unsigned int s = part; s < gridDim.y; s += parts)
            add(__ldcg(partial + (size_t)s * columns), s, first[0], second[0]);
    }
    add_parts<double, 1>(first, second, part, parts, slot, width, shared);
    if (part == 0) finish(start + slot, slot, first[0], second[0]);
}

// The whole second stage for plain sums: finish(column, sum of first, sum of second) once a column.
template <typename Finish>
__device__ __forceinline__ void finish_sums(float (&first)[V], float (&second)[V], float2 *partial,
                                            unsigned int *tickets, unsigned int columns, double *shared, Finish finish) {
    add_rows(first, second, shared);
    if (!leave_sums(first, second, partial, tickets, columns)) return;
    add_splits(
        partial, columns, shared, [](float2 value, unsigned int, double &a, double &b) { a += value.x, b += value.y; },
        [=](unsigned int column, unsigned int, double a, double b) { finish(column, a, b); });
}

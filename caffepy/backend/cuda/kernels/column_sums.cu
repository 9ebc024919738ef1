// Two sums for each channel over all rows, in one launch; put after columns.cu and before the kernels that need sums.
//
// After walking through its rows a block adds up what its threads have and leaves two numbers a column in `partial`,
// (splits, columns), where blockIdx.y is the split. The block that is the last to do so for its columns adds up those
// of all. Every sum is made in an order that depends on the shape alone.
//
// Standing before, beside what columns.cu needs: GROUPS, the most groups of columns that a block has.

// The memory in which a block adds up; both float packs and doubles are kept there, so it is aligned for the wider.
__device__ __forceinline__ double *sums_memory() {
    __shared__ alignas(16) double memory[THREADS * (V > 2 ? V : 2)];
    return memory;
}

// How threads share the columns of a block once they are through their rows: each has one, `parts` of them the same.
struct Share {
    unsigned int width, slot, part, parts, column;
};

__device__ __forceinline__ Share own_share() {
    const unsigned int width = blockDim.x * V, slot = own_thread() % width;
    return {width, slot, own_thread() / width, max(blockDim.y / V, 1u), blockIdx.x * width + slot};
}

// Adds up the values of all parts of a column; the results are in part 0.
template <typename A>
__device__ __forceinline__ void add_parts(A &first, A &second, const Share &own, A *shared) {
    for (unsigned int parts = own.parts; parts > 1;) {
        // Sixteen at a time: a tree of pairs would need four times as many barriers.
        const unsigned int left = (parts + 15) / 16;
        A *const at = shared + 2 * own.slot;
        __syncthreads();
        if (own.part >= left && own.part < parts) {
            at[2 * own.part * own.width] = first;
            at[2 * own.part * own.width + 1] = second;
        }
        __syncthreads();
        if (own.part < left) {
            for (unsigned int p = own.part + left; p < parts; p += left) {
                first += at[2 * p * own.width];
                second += at[2 * p * own.width + 1];
            }
        }
        parts = left;
    }
}

// The block's sums of the thread's column, in part 0, from those of each thread for its V columns.
__device__ __forceinline__ float2 add_rows(const Pack<float, V> &first, const Pack<float, V> &second, const Share &own,
                                           double *shared) {
    float *const lines = reinterpret_cast<float *>(shared);
    const unsigned int line = 2 * own.width;
    float *const to = lines + threadIdx.y * line + threadIdx.x * V;
    store_raw(to, 0, first);
    store_raw(to + own.width, 0, second);
    __syncthreads();
    float2 sums = make_float2(0.0f, 0.0f);
    if (own.part < own.parts) {
        for (unsigned int row = own.part; row < blockDim.y; row += own.parts) {
            sums.x += lines[row * line + own.slot];
            sums.y += lines[row * line + own.width + own.slot];
        }
    }
    add_parts(sums.x, sums.y, own, lines);
    return sums;
}

// How many rows the blocks with blockIdx.y == split have: from 1 to strips * blockDim.y.
__device__ __forceinline__ unsigned int rows_of(unsigned int split, unsigned int rows) {
    const unsigned int down = blockDim.y, strips = (rows + down - 1) / down;
    const unsigned int each = strips / gridDim.y, more = strips % gridDim.y;
    const unsigned int last = more ? more - 1 : gridDim.y - 1;
    return (each + (split < more)) * down - (split == last ? strips * down - rows : 0);
}

// The next ticket, from 0 to gridDim.y - 1 and then from 0 again. Who draws a later one sees what was written before.
__device__ __forceinline__ unsigned int draw(unsigned int *tickets) {
    unsigned int ticket;
#if __CUDA_ARCH__ >= 700
    // The counter wraps to zero with the last block, so the next launch, also of a captured graph, finds it ready
    // without a copy or a kernel that clears it.
    asm volatile("atom.acq_rel.gpu.inc.u32 %0, [%1], %2;"
                 : "=r"(ticket)
                 : "l"(tickets), "r"(gridDim.y - 1)
                 : "memory");
#else
    __threadfence();
    ticket = atomicInc(tickets, gridDim.y - 1);
    __threadfence();
#endif
    return ticket;
}

// Given the block's sums of the thread's column in part 0: add(sums of a split, split, a, b) for all splits, then once
// a column finish(own, a, b, old0[column], old1[column]). All threads of a block must come here.
template <typename Add, typename Finish>
__device__ __forceinline__ void finish_columns(float2 sums, const Share &own, float2 *partial, unsigned int *tickets,
                                               unsigned int columns, const float *old0, const float *old1,
                                               double *shared, Add add, Finish finish) {
    __shared__ unsigned int ticket;
    const bool exists = own.part < own.parts && own.column < columns, holds = exists && own.part == 0;
    double a = 0.0, b = 0.0;
    if (gridDim.y > 1) {
        if (holds) partial[(size_t)blockIdx.y * columns + own.column] = sums;
        __syncthreads();
        // Behind the barrier: the ticket publishes what all threads of the block have written.
        if (own_thread() == 0) ticket = draw(tickets + blockIdx.x);
        __syncthreads();
        if (ticket != gridDim.y - 1) return;
    }
    // Loaded before the sums are read, so that both waits overlap.
    const float kept0 = holds ? old0[own.column] : 0.0f, kept1 = holds ? old1[own.column] : 0.0f;
    if (gridDim.y == 1) {
        add(sums, 0, a, b);
    } else {
        if (exists) {
            const float2 *const from = partial + own.column;
#pragma unroll 8
            for (unsigned int s = own.part; s < gridDim.y; s += own.parts)
                // From the L2 cache, where all blocks write; this multiprocessor's L1 may hold an older value.
                add(__ldcg(from + (size_t)s * columns), s, a, b);
        }
        add_parts(a, b, own, shared);
    }
    if (holds) finish(own, a, b, kept0, kept1);
}

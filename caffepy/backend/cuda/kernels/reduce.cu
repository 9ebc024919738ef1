// Put before the reductions that cuda/codegen.py writes, and with a TYPE defined a kernel of its own: how the sums of a
// block's threads, and then those of all blocks, become one. Everything is added up in double and always in the same order.

#define BLOCK 256
#define WARPS (BLOCK / 32)

// Whether this is the last of the blocks that share a ticket, so that it sees what all have written; all threads call it.
// The ticket starts at zero and ends there.
__device__ __forceinline__ bool is_last_block(unsigned int *ticket, unsigned int blocks) {
    __shared__ bool last;
    // What the block has written must be visible before the ticket is drawn; behind the ticket, the last block's reads
    // must not be older than it.
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) last = atomicInc(ticket, blocks - 1) == blocks - 1;
    __syncthreads();
    if (last) __threadfence();
    return last;
}

template <typename T>
__device__ __forceinline__ void put_total(T *out, double total, int accumulate) {
    *out = Rounded<T>::one((float)((accumulate ? (double)to_float(*out) : 0.0) + total));
}

// The sums of BLOCK threads for each of ACROSS * V columns: thread t holds columns t % ACROSS * V and the V - 1 after it.
// The total of column c is returned to thread c.
template <int ACROSS, int V>
__device__ __forceinline__ double column_total(double (&sum)[V], double *shared) {
    const int pack = threadIdx.x % ACROSS, warp = threadIdx.x / 32;
#pragma unroll
    for (int k = 0; k < V; ++k)
#pragma unroll
        for (int offset = ACROSS; offset < 32; offset *= 2) sum[k] += __shfl_xor_sync(0xffffffffu, sum[k], offset);
    __syncthreads();
    if (threadIdx.x % 32 < ACROSS)
#pragma unroll
        for (int k = 0; k < V; ++k) shared[(warp * ACROSS + pack) * V + k] = sum[k];
    __syncthreads();
    double total = 0.0;
    if (threadIdx.x < ACROSS * V)
#pragma unroll
        for (int w = 0; w < WARPS; ++w) total += shared[w * ACROSS * V + threadIdx.x];
    return total;
}

// The totals of `splits` rows of partial sums, each `step` after the one before, for COLUMNS columns of which `mine` is how
// many there are; the total of column c is returned to thread c.
template <int COLUMNS>
__device__ __forceinline__ double split_total(const double *partial, unsigned int splits, size_t step, unsigned int mine,
                                              double *shared) {
    const unsigned int column = threadIdx.x % COLUMNS, group = threadIdx.x / COLUMNS, groups = BLOCK / COLUMNS;
    double sum = 0.0;
    if (column < mine)
#pragma unroll 16
        for (unsigned int s = group; s < splits; s += groups) sum += __ldcg(partial + s * step + column);
    __syncthreads();
    shared[threadIdx.x] = sum;
    __syncthreads();
    double total = 0.0;
    if (threadIdx.x < COLUMNS)
        for (unsigned int g = 0; g < groups; ++g) total += shared[g * COLUMNS + threadIdx.x];
    return total;
}

// The total of `splits` partial sums, each `step` after the one before, for thread 0 of a block of any size.
__device__ __forceinline__ double split_total(const double *partial, unsigned int splits, size_t step) {
    double sum = 0.0;
    for (unsigned int s = threadIdx.x; s < splits; s += blockDim.x) sum += __ldcg(partial + s * step);
    return block_sum(sum);
}

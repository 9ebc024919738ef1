// Mean and variance of each channel in one pass. Put after statistics.cu.
//
// Each thread measures from the first number it meets, each block from its first thread's mean. What blocks leave is
// counted from the channel's very first number. So what is squared and added up stays as small as the deviation, however
// large the mean is.
//
// Standing before, beside what columns.cu needs: X.

extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    measure(const X *x, float2 *partial, unsigned int *tickets, float *mean, float *inverse, float *sum_mean,
            float *sum_variance, float *count, float epsilon, float fraction, unsigned int rows, unsigned int columns,
            unsigned int inner) {
    __shared__ double shared[SHARED_DOUBLES];
    __shared__ float first_row[MOST_COLUMNS];
    const unsigned int column = own_column(), step = row_step();
    float origin[V] = {}, first[V] = {}, second[V] = {};
    unsigned int seen = 0;
    if (threadIdx.y == 0 && column < columns) {
        Elements<X> in;
        in.load(x + place(0, column, columns, inner));
#pragma unroll
        for (int j = 0; j < V; ++j) first_row[threadIdx.x * V + j] = in[j];
    }
    if (column < columns) walk(rows, [&](unsigned int row, auto complete) {
        Elements<X> in[ROWS];
#pragma unroll
        for (int u = 0; u < ROWS; ++u) {
            if (!complete.value && row + u * step >= rows) break;
            in[u].load(x + place(row + u * step, column, columns, inner));
        }
        if (seen == 0 && row < rows) {
#pragma unroll
            for (int j = 0; j < V; ++j) origin[j] = in[0][j];
        }
#pragma unroll
        for (int u = 0; u < ROWS; ++u) {
            if (!complete.value && row + u * step >= rows) break;
#pragma unroll
            for (int j = 0; j < V; ++j) {
                const float distance = in[u][j] - origin[j];
                first[j] += distance;
                second[j] = fmaf(distance, distance, second[j]);
            }
            ++seen;
        }
    });
    float *pivots = reinterpret_cast<float *>(shared) + threadIdx.x * V, pivot[V];
    const float share = seen ? 1.0f / seen : 0.0f;
#pragma unroll
    for (int j = 0; j < V; ++j)
        if (threadIdx.y == 0) pivots[j] = origin[j] + first[j] * share;
    __syncthreads();
#pragma unroll
    for (int j = 0; j < V; ++j) {
        pivot[j] = pivots[j];
        const float own = first[j] * share, squares = fmaxf(second[j] - first[j] * own, 0.0f);
        const float distance = origin[j] - pivot[j] + own;
        first[j] = seen * distance;
        second[j] = seen ? squares + seen * distance * distance : 0.0f;
    }
    add_rows(first, second, shared);
    if (threadIdx.y == 0) {
        const float block_share = 1.0f / rows_of(blockIdx.y, rows);
#pragma unroll
        for (int j = 0; j < V; ++j) {
            const float own = first[j] * block_share;
            second[j] -= first[j] * own;
            first[j] = pivot[j] - first_row[threadIdx.x * V + j] + own;
        }
    }
    if (!leave_sums(first, second, partial, tickets, columns)) return;
    const Statistics statistics = {mean, inverse, sum_mean, sum_variance, count, epsilon, fraction};
    add_splits(
        partial, columns, shared,
        [=](float2 value, unsigned int split, double &a, double &b) {
            const double moment = (double)rows_of(split, rows) * value.x;
            a += moment;
            b += value.y + moment * value.x;
        },
        [&](unsigned int c, unsigned int slot, double a, double b) {
            const double share = 1.0 / rows, own = a * share;
            keep(statistics, c, first_row[slot] + own, (b - a * own) * share, rows, c == 0);
        });
}

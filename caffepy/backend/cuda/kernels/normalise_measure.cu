// Mean and variance of each channel in one pass. Put after statistics.cu.
//
// Each thread measures from the first number it meets, each block from its first thread's mean. What blocks leave is
// counted from the channel's very first number. So what is squared and added up stays as small as the deviation,
// however large the mean is.
//
// Standing before, beside what columns.cu needs: X.

extern "C" __global__ void __launch_bounds__(THREADS)
    measure(const X *x, float2 *partial, unsigned int *tickets, float *mean, float *inverse, float *sum_mean,
            float *sum_variance, float *count, float epsilon, float fraction, unsigned int rows, unsigned int columns,
            unsigned int inner) {
    const Statistics statistics = {mean, inverse, sum_mean, sum_variance, count, epsilon, fraction};
    double *const shared = sums_memory();
    __shared__ float first_row[GROUPS * V], pivots[GROUPS * V];
    const unsigned int column = own_column(), step = row_step(), slot = threadIdx.x * V;
    Pack<float, V> origin = {}, first = {}, second = {};
    unsigned int seen = 0;
    if (blockIdx.x == 0 && blockIdx.y == 0 && own_thread() == 0) keep_count(statistics);
    if (threadIdx.y == 0 && column < columns) {
        Elements<X> in = {};
        if (rows > 0) in.load(x + place(0, column, columns, inner));
#pragma unroll
        for (int j = 0; j < V; ++j) first_row[slot + j] = in[j];
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
    const float share = seen ? 1.0f / seen : 0.0f;
#pragma unroll
    for (int j = 0; j < V; ++j)
        if (threadIdx.y == 0) pivots[slot + j] = origin[j] + first[j] * share;
    __syncthreads();
#pragma unroll
    for (int j = 0; j < V; ++j) {
        // Rounding may leave a sum of squares below 0; larger_of lets NaN pass.
        const float mean = first[j] * share, squares = larger_of(second[j] - first[j] * mean, 0.0f);
        const float distance = origin[j] - pivots[slot + j] + mean;
        first[j] = seen * distance;
        second[j] = seen ? squares + seen * distance * distance : 0.0f;
    }
    const Share own = own_share();
    float2 sums = add_rows(first, second, own, shared);
    if (own.part == 0) {
        const float mean = sums.x / max(rows_of(blockIdx.y, rows), 1u);
        // From the block's pivot to the block's mean. The last block joins the means and squares of all (Chan, Golub
        // and LeVeque's formula).
        sums.y -= sums.x * mean;
        sums.x = pivots[own.slot] - first_row[own.slot] + mean;
    }
    finish_columns(
        sums, own, partial, tickets, columns, sum_mean, sum_variance, shared,
        [=](float2 block, unsigned int split, double &a, double &b) {
            const double moment = (double)rows_of(split, rows) * block.x;
            a += moment;
            b += block.y + moment * block.x;
        },
        [&](const Share &own, double a, double b, float old_mean, float old_variance) {
            const double share = 1.0 / max(rows, 1u), mean = a * share;
            const double variance = (b - a * mean) * share;
            keep(statistics, own.column, first_row[own.slot] + mean, variance, rows, old_mean, old_variance);
        });
}

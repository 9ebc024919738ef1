// First pass of batch normalisation's gradient: g = the sum of SOURCES gradients, 0 where the ReLU was off; for each
// channel the sums of g and of g * normal; with TOTAL g itself.
//
// Standing before, beside what columns.cu needs: X, D (dtype of the gradients and the total), SOURCES (1 to 4),
// RELU (0 none, 1 as the mask says, 2 as x says), TOTAL.

static_assert(SOURCES >= 1 && SOURCES <= 4, "the kernel has four arguments for gradients");

extern "C" __global__ void __launch_bounds__(THREADS)
    normalise_sums(const X *x, const D *dy0, const D *dy1, const D *dy2, const D *dy3, const float *mean,
                   const float *inverse, const float *scale, const float *bias, const unsigned char *mask, D *total,
                   float *sum_dy_x, float *sum_dy, float2 *partial, unsigned int *tickets, unsigned int rows,
                   unsigned int columns, unsigned int inner) {
    double *const shared = sums_memory();
    const D *const sources[4] = {dy0, dy1, dy2, dy3};
    const unsigned int column = own_column(), step = row_step();
    Pack<float, V> first = {}, second = {};
    if (column < columns) {
        float centre[V], factor[V], shift[V];
        channels(mean, column, centre);
        if (RELU == 2) fold(mean, inverse, scale, bias, column, factor, shift);
        walk(rows, [&](unsigned int row, auto complete) {
            Elements<X> in[ROWS];
            Elements<D> gradients[ROWS][SOURCES];
            unsigned int bits[ROWS];
#pragma unroll
            for (int u = 0; u < ROWS; ++u) {
                if (!complete.value && row + u * step >= rows) break;
                const size_t at = place(row + u * step, column, columns, inner);
                in[u].load(x + at);
#pragma unroll
                for (int k = 0; k < SOURCES; ++k) gradients[u][k].load(sources[k] + at);
                if (RELU == 1) bits[u] = (unsigned int)mask[at / 8] >> at % 8;
            }
#pragma unroll
            for (int u = 0; u < ROWS; ++u) {
                if (!complete.value && row + u * step >= rows) break;
                Pack<float, V> g;
#pragma unroll
                for (int j = 0; j < V; ++j) {
                    const float value = in[u][j];
                    g[j] = gradients[u][0][j];
#pragma unroll
                    for (int k = 1; k < SOURCES; ++k) g[j] += gradients[u][k][j];
                    if (RELU == 1 && !(bits[u] >> j & 1u)) g[j] = 0.0f;
                    if (RELU == 2 && !(normalised(value, factor[j], shift[j]) > 0.0f)) g[j] = 0.0f;
                    first[j] += g[j];
                    // The distance from the mean, because the sum of g * x would be cancelled by mean * (sum of g).
                    second[j] = fmaf(g[j], value - centre[j], second[j]);
                }
                if (TOTAL) store(total + place(row + u * step, column, columns, inner), 0, g);
            }
        });
    }
    const Share own = own_share();
    finish_columns(
        add_rows(first, second, own, shared), own, partial, tickets, columns, inverse, inverse, shared,
        [](float2 block, unsigned int, double &a, double &b) { a += block.x, b += block.y; },
        [=](const Share &own, double a, double b, float inverse, float) {
            sum_dy[own.column] = (float)a;
            sum_dy_x[own.column] = (float)(b * inverse);
        });
}

// dx = dy where y > 0, else 0; and the sums of dx for each channel if BIASED. Without it the arrays are seen as rows of
// V columns.
//
// Standing before, beside what columns.cu needs: X (storage of y), D (of dy), Y (of dx), BIASED.

extern "C" __global__ void __launch_bounds__(THREADS)
    relu_gradient(const X *y, const D *dy, Y *dx, float *dbias, int accumulate, float2 *partial,
                  unsigned int *tickets, unsigned int rows, unsigned int columns, unsigned int inner) {
    const unsigned int column = own_column(), step = row_step();
    Pack<float, V> sums = {};
    if (column < columns) walk(rows, [&](unsigned int row, auto complete) {
        Elements<X> in[ROWS];
        Elements<D> gradient[ROWS];
#pragma unroll
        for (int u = 0; u < ROWS; ++u) {
            if (!complete.value && row + u * step >= rows) break;
            const size_t at = place(row + u * step, column, columns, inner);
            in[u].load(y + at);
            gradient[u].load(dy + at);
        }
#pragma unroll
        for (int u = 0; u < ROWS; ++u) {
            if (!complete.value && row + u * step >= rows) break;
            Pack<float, V> g;
#pragma unroll
            for (int j = 0; j < V; ++j) {
                g[j] = in[u][j] > 0.0f ? gradient[u][j] : 0.0f;
                sums[j] += g[j];
            }
            store(dx + place(row + u * step, column, columns, inner), 0, g);
        }
    });
    if constexpr (BIASED) {
        __shared__ alignas(16) double shared[SHARED_DOUBLES];
        const Share own = own_share();
        finish_columns(
            add_rows(sums, sums, own, shared), own, partial, tickets, columns, dbias, dbias, shared,
            [](float2 block, unsigned int, double &a, double &b) { a += block.x, b += block.y; },
            [=](const Share &own, double sum, double, float old, float) {
                dbias[own.column] = (float)(sum + (accumulate ? old : 0.0f));
            });
    }
}

// dx = a formula of y and dy; and the sums of dx for each channel if BIASED. Without it the arrays are seen as rows of
// V columns.
//
// Standing before, beside what columns.cu needs: X (dtype of y), D (of dy), Y (of dx), BIASED, and the formula as
// formula_(y, dy, dx).

extern "C" __global__ void __launch_bounds__(THREADS)
    activation_gradient(const X *y, const D *dy, Y *dx, float *dbias, int accumulate, float2 *partial,
                        unsigned int *tickets, unsigned int rows, unsigned int columns, unsigned int inner) {
    const unsigned int column = own_column();
    Pack<float, V> sums = {};
    const auto work = [&](size_t at, const Elements<X> &in, const Elements<D> &gradient) {
        Pack<float, V> g;
#pragma unroll
        for (int j = 0; j < V; ++j) {
            formula_(in[j], gradient[j], g[j]);
            sums[j] += g[j];
        }
        store(dx + at, 0, g);
    };
    if (column < columns) walk_both(y, dy, column, rows, columns, inner, work);
    if constexpr (BIASED) {
        double *const shared = sums_memory();
        const Share own = own_share();
        finish_columns(
            add_rows(sums, sums, own, shared), own, partial, tickets, columns, dbias, dbias, shared,
            [](float2 block, unsigned int, double &a, double &b) { a += block.x, b += block.y; },
            [=](const Share &own, double sum, double, float old, float) {
                dbias[own.column] = (float)(sum + (accumulate ? old : 0.0f));
            });
    }
}

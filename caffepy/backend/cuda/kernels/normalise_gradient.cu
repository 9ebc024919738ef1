// dx = scale * inverse * (g - (sum_dy + normal * sum_dy_x) / m); g = dy, with RELU 0 where the ReLU was off.
//
// Standing before, beside what columns.cu needs: X, D (dtype of dy), Y (of dx), RELU.

extern "C" __global__ void __launch_bounds__(THREADS)
    normalise_gradient(const X *x, const D *dy, const float *mean, const float *inverse, const float *scale,
                       const float *bias, const float *sum_dy_x, const float *sum_dy, Y *dx, float per_element,
                       unsigned int rows, unsigned int columns, unsigned int inner) {
    const unsigned int column = own_column();
    if (column >= columns) return;
    float factor[V], shift[V], slope[V], offset[V];
    {
        float m[V];
        fold(mean, inverse, scale, bias, column, factor, shift);
        channels(sum_dy_x, column, slope);
        channels(inverse, column, m);
        // For a channel dx is a sum of g, x and a constant with three factors: they are made once for all rows.
#pragma unroll
        for (int j = 0; j < V; ++j) slope[j] *= -factor[j] * m[j] * per_element;
        channels(mean, column, m);
        channels(sum_dy, column, offset);
#pragma unroll
        for (int j = 0; j < V; ++j) offset[j] = -factor[j] * offset[j] * per_element - slope[j] * m[j];
    }
    const auto work = [&](size_t at, const Elements<X> &in, const Elements<D> &gradient) {
        Pack<float, V> out;
#pragma unroll
        for (int j = 0; j < V; ++j) {
            const float value = in[j];
            float g = gradient[j];
            if (RELU && !(normalised(value, factor[j], shift[j]) > 0.0f)) g = 0.0f;
            out[j] = fmaf(factor[j], g, fmaf(slope[j], value, offset[j]));
        }
        store(dx + at, 0, out);
    };
    walk_both(x, dy, column, rows, columns, inner, work);
}

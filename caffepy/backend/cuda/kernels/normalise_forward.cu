// y = (x - mean) * inverse * scale + bias (+ residual), or the maximum of that and 0; and a bit an element: whether it
// was above 0.
//
// Standing before, beside what columns.cu needs: X, R, Y (dtype), RESIDUAL, RELU, MASK.

// One bit an element. With four elements a thread, two threads make a byte; their elements begin at a multiple of 8.
__device__ __forceinline__ void write_bits(unsigned char *mask, size_t at, unsigned int bits) {
    if constexpr (V == 8) {
        mask[at / 8] = (unsigned char)bits;
    } else {
        const unsigned int lane = own_thread() % 32;
        // Only the two lanes that make a byte meet here: others of the warp may have no row or column.
        const unsigned int upper = __shfl_xor_sync(3u << (lane & 30u), bits, 1);
        if (lane % 2 == 0) mask[at / 8] = (unsigned char)(bits | upper << 4);
    }
}

// A NaN passes, so that an overflow does not end here unnoticed.
__device__ __forceinline__ float rectified(float value) {
    return value <= 0.0f ? 0.0f : value;
}

extern "C" __global__ void __launch_bounds__(THREADS)
    normalise_forward(const X *x, const float *mean, const float *inverse, const float *scale, const float *bias,
                      const R *residual, Y *y, unsigned char *mask, unsigned int rows, unsigned int columns,
                      unsigned int inner) {
    const unsigned int column = own_column(), step = row_step();
    if (column >= columns) return;
    float factor[V], shift[V];
    fold(mean, inverse, scale, bias, column, factor, shift);
    walk(rows, [&](unsigned int row, auto complete) {
        Elements<X> in[ROWS];
        Elements<R> other[ROWS];
#pragma unroll
        for (int u = 0; u < ROWS; ++u) {
            if (!complete.value && row + u * step >= rows) break;
            const size_t at = place(row + u * step, column, columns, inner);
            in[u].load(x + at);
            if (RESIDUAL) other[u].load(residual + at);
        }
#pragma unroll
        for (int u = 0; u < ROWS; ++u) {
            if (!complete.value && row + u * step >= rows) break;
            const size_t at = place(row + u * step, column, columns, inner);
            Pack<float, V> value;
            unsigned int bits = 0;
#pragma unroll
            for (int j = 0; j < V; ++j) {
                value[j] = normalised(in[u][j], factor[j], shift[j]);
                if (RESIDUAL) value[j] += other[u][j];
                if (MASK) bits |= value[j] > 0.0f ? 1u << j : 0u;
                if (RELU) value[j] = rectified(value[j]);
            }
            store(y + at, 0, value);
            if (MASK) write_bits(mask, at, bits);
        }
    });
}

// The same for arrays whose rows are not made of whole bytes of the mask: one thread eight neighbouring elements.
extern "C" __global__ void normalise_forward_bits(const X *x, const float *mean, const float *inverse,
                                                  const float *scale, const float *bias, const R *residual, Y *y,
                                                  unsigned char *mask, unsigned int columns, unsigned int inner,
                                                  unsigned long long size) {
    const unsigned long long step = (unsigned long long)gridDim.x * blockDim.x * 8;
    for (unsigned long long start = (unsigned long long)(blockIdx.x * blockDim.x + threadIdx.x) * 8; start < size;
         start += step) {
        unsigned int bits = 0;
        for (int j = 0; j < 8 && start + j < size; ++j) {
            const unsigned long long at = start + j;
            const unsigned int column = at / inner % columns;
            const float factor = __fmul_rn(inverse[column], scale[column]);
            const float shift = __fmaf_rn(-mean[column], factor, bias[column]);
            Pack<float, 1> value = {normalised(to_float(x[at]), factor, shift)};
            if (RESIDUAL) value[0] += to_float(residual[at]);
            bits |= value[0] > 0.0f ? 1u << j : 0u;
            if (RELU) value[0] = rectified(value[0]);
            store(y + at, 0, value);
        }
        mask[start / 8] = (unsigned char)bits;
    }
}

// destination = the sum of SOURCES arrays of one shape. The arrays are seen as rows of V columns.
//
// Standing before, beside what columns.cu needs: D (type of the sources), Y (of the result), SOURCES (2 to 8).

extern "C" __global__ void __launch_bounds__(THREADS)
    add_n(const D *source0, const D *source1, const D *source2, const D *source3, const D *source4,
          const D *source5, const D *source6, const D *source7, Y *destination, unsigned int rows,
          unsigned int columns, unsigned int inner) {
    const D *const sources[8] = {source0, source1, source2, source3, source4, source5, source6, source7};
    const unsigned int step = row_step();
    walk(rows, [&](unsigned int row, auto complete) {
        Elements<D> terms[ROWS][SOURCES];
#pragma unroll
        for (int u = 0; u < ROWS; ++u) {
            if (!complete.value && row + u * step >= rows) break;
#pragma unroll
            for (int k = 0; k < SOURCES; ++k) terms[u][k].load(sources[k] + place(row + u * step, 0, columns, inner));
        }
#pragma unroll
        for (int u = 0; u < ROWS; ++u) {
            if (!complete.value && row + u * step >= rows) break;
            Pack<float, V> sum;
#pragma unroll
            for (int j = 0; j < V; ++j) {
                sum[j] = terms[u][0][j];
#pragma unroll
                for (int k = 1; k < SOURCES; ++k) sum[j] += terms[u][k][j];
            }
            store(destination + place(row + u * step, 0, columns, inner), 0, sum);
        }
    });
}

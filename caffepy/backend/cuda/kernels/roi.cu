// Pooling of regions of interest, and stochastic pooling, over channels-last arrays of float32. Gradients are gathered: each
// pixel adds up what the regions give it, in their order, so that no atomics are needed.

struct Range {
    int begin, end;
    __device__ __forceinline__ bool empty() const { return end <= begin; }
    __device__ __forceinline__ bool has(int i) const { return begin <= i && i < end; }
};

__device__ __forceinline__ int clip(int i, int size) { return min(max(i, 0), size); }

// Bin `number` of `bins` of a region of Fast R-CNN: the pixels from `first` to `last`, both within it.
__device__ __forceinline__ Range max_bin(float first, float last, float scale, int number, int bins, int size) {
    const int from = (int)roundf(first * scale), to = (int)roundf(last * scale);
    const float length = (float)max(to - from + 1, 1) / (float)bins;
    return {clip((int)floorf((float)number * length) + from, size),
            clip((int)ceilf((float)(number + 1) * length) + from, size)};
}

// The same of R-FCN, whose regions need not begin at a whole pixel.
__device__ __forceinline__ Range mean_bin(float first, float last, float scale, int number, int bins, int size) {
    const float from = roundf(first) * scale, to = (roundf(last) + 1.0f) * scale;
    const float length = fmaxf(to - from, 0.1f) / (float)bins;
    return {clip((int)floorf((float)number * length + from), size),
            clip((int)ceilf((float)(number + 1) * length + from), size)};
}

// The sample of a region, -1 if it does not exist.
__device__ __forceinline__ int sample_of(const float *roi, int samples) {
    return roi[0] > -1.0f && roi[0] < (float)samples ? (int)roi[0] : -1;
}

extern "C" __global__ void roi_max_forward(const float *x, const float *rois, float *y, int *mask, int *bad, float scale,
                                           int samples, int channels, int height, int width, int rows, int columns,
                                           unsigned int count) {
    EACH_INDEX(i, count) {
        const int c = i % channels, bin = i / channels, number = bin / (rows * columns);
        const float *roi = rois + 5 * (size_t)number;
        const int sample = sample_of(roi, samples);
        if (sample < 0) *bad = number;
        const Range h = max_bin(roi[2], roi[4], scale, bin / columns % rows, rows, height);
        const Range w = max_bin(roi[1], roi[3], scale, bin % columns, columns, width);
        float best = 0.0f;
        int where = -1;
        for (int row = h.begin; sample >= 0 && row < h.end; ++row)
            for (int column = w.begin; column < w.end; ++column) {
                const float value = x[(((size_t)sample * height + row) * width + column) * channels + c];
                if (where < 0 || value > best) best = value, where = row * width + column;
            }
        y[i] = best;
        mask[i] = where;
    }
}

extern "C" __global__ void roi_max_backward(const float *dy, const float *rois, const int *mask, float *dx, float scale,
                                            int samples, int channels, int height, int width, int rows, int columns,
                                            int regions, unsigned int count) {
    EACH_INDEX(i, count) {
        const int c = i % channels, over = i / channels, pixel = over % (height * width), n = over / (height * width);
        const int row = pixel / width, column = pixel - row * width;
        float sum = 0.0f;
        for (int number = 0; number < regions; ++number) {
            const float *roi = rois + 5 * (size_t)number;
            if (sample_of(roi, samples) != n) continue;
            for (int h = 0; h < rows; ++h) {
                if (!max_bin(roi[2], roi[4], scale, h, rows, height).has(row)) continue;
                for (int w = 0; w < columns; ++w) {
                    const size_t at = (((size_t)number * rows + h) * columns + w) * channels + c;
                    if (mask[at] == pixel) sum += dy[at];
                }
            }
        }
        dx[i] = sum;
    }
}

extern "C" __global__ void roi_average_forward(const float *x, const float *rois, float *y, int *bad, float scale,
                                               int samples, int channels, int height, int width, int outputs, int group,
                                               unsigned int count) {
    EACH_INDEX(i, count) {
        const int d = i % outputs, bin = i / outputs, number = bin / (group * group);
        const int row = bin / group % group, column = bin % group;
        const float *roi = rois + 5 * (size_t)number;
        const int sample = sample_of(roi, samples);
        if (sample < 0) *bad = number;
        const Range h = mean_bin(roi[2], roi[4], scale, row, group, height);
        const Range w = mean_bin(roi[1], roi[3], scale, column, group, width);
        const int c = (d * group + row) * group + column;
        float sum = 0.0f;
        for (int r = h.begin; sample >= 0 && r < h.end; ++r)
            for (int k = w.begin; k < w.end; ++k) sum += x[(((size_t)sample * height + r) * width + k) * channels + c];
        y[i] = sample < 0 || h.empty() || w.empty() ? 0.0f : sum / (float)((h.end - h.begin) * (w.end - w.begin));
    }
}

extern "C" __global__ void roi_average_backward(const float *dy, const float *rois, float *dx, float scale, int samples,
                                                int channels, int height, int width, int outputs, int group, int regions,
                                                unsigned int count) {
    EACH_INDEX(i, count) {
        const int c = i % channels, over = i / channels, pixel = over % (height * width), n = over / (height * width);
        const int row = c / group % group, column = c % group, d = c / (group * group);
        float sum = 0.0f;
        for (int number = 0; number < regions; ++number) {
            const float *roi = rois + 5 * (size_t)number;
            if (sample_of(roi, samples) != n) continue;
            const Range h = mean_bin(roi[2], roi[4], scale, row, group, height);
            const Range w = mean_bin(roi[1], roi[3], scale, column, group, width);
            if (h.has(pixel / width) && w.has(pixel % width))
                sum += dy[(((size_t)number * group + row) * group + column) * outputs + d] /
                       (float)((h.end - h.begin) * (w.end - w.begin));
        }
        dx[i] = sum;
    }
}

// A coordinate moved into [0, size - 1]; -1 if it is more than half a pixel outside.
__device__ __forceinline__ float inside(float at, int size) {
    return at >= -0.5f && at <= (float)size - 0.5f ? fminf(fmaxf(at, 0.0f), (float)(size - 1)) : -1.0f;
}

// Regions as points (row i, column j) of a grid; `group` > 1 gives each of group^2 parts of the grid its own channel.
extern "C" __global__ void roi_bilinear_forward(const float *x, const float *named, const float *rows,
                                                const float *columns, float *y, int *bad, int samples, int channels,
                                                int height, int width, int outputs, int high, int wide, int group,
                                                unsigned int count) {
    EACH_INDEX(i, count) {
        const int d = i % outputs, point = i / outputs, number = point / (high * wide);
        const int row = point / wide % high, column = point % wide;
        const int sample = sample_of(named + number, samples);
        if (sample < 0) *bad = number;
        const float h = inside(rows[number * high + row], height), w = inside(columns[number * wide + column], width);
        if (sample < 0 || h < 0.0f || w < 0.0f) {
            y[i] = 0.0f;
            continue;
        }
        const int top = (int)h, left = (int)w, below = min(top + 1, height - 1), right = min(left + 1, width - 1);
        const int c = (d * group + row * group / high) * group + column * group / wide;
        const float *plane = x + (size_t)sample * height * width * channels + c;
        const float a = h - (float)top, b = w - (float)left;
        const float first = (1.0f - b) * plane[(size_t)(top * width + left) * channels] +
                            b * plane[(size_t)(top * width + right) * channels];
        const float second = (1.0f - b) * plane[(size_t)(below * width + left) * channels] +
                             b * plane[(size_t)(below * width + right) * channels];
        y[i] = (1.0f - a) * first + a * second;
    }
}

extern "C" __global__ void roi_bilinear_backward(const float *dy, const float *named, const float *rows,
                                                 const float *columns, float *dx, int samples, int channels, int height,
                                                 int width, int outputs, int high, int wide, int regions, int group,
                                                 unsigned int count) {
    EACH_INDEX(i, count) {
        const int c = i % channels, over = i / channels, pixel = over % (height * width), n = over / (height * width);
        const float row = (float)(pixel / width), column = (float)(pixel % width);
        const int d = c / (group * group), tall = high / group, broad = wide / group;
        const int from_row = c / group % group * tall, from_column = c % group * broad;
        float sum = 0.0f;
        for (int number = 0; number < regions; ++number) {
            if (sample_of(named + number, samples) != n) continue;
            for (int h = from_row; h < from_row + tall; ++h) {
                const float at = inside(rows[number * high + h], height), a = 1.0f - fabsf(at - row);
                if (at < 0.0f || a <= 0.0f) continue;
                for (int w = from_column; w < from_column + broad; ++w) {
                    const float to = inside(columns[number * wide + w], width), b = 1.0f - fabsf(to - column);
                    if (to < 0.0f || b <= 0.0f) continue;
                    sum += a * b * dy[(((size_t)number * high + h) * wide + w) * outputs + d];
                }
            }
        }
        dx[i] = sum;
    }
}

// One window and channel a thread; `chance` has a number in [0, 1) for each.
extern "C" __global__ void stochastic_forward(const float *x, const float *chance, float *y, int *mask, int channels,
                                              int height, int width, int out_height, int out_width, int kernel_h,
                                              int kernel_w, int stride_h, int stride_w, unsigned int count) {
    EACH_INDEX(i, count) {
        const int c = i % channels, window = i / channels, n = window / (out_height * out_width);
        const int top = window / out_width % out_height * stride_h, left = window % out_width * stride_w;
        const int bottom = min(top + kernel_h, height), right = min(left + kernel_w, width);
        const float *plane = x + (size_t)n * height * width * channels + c;
        float total = 0.0f, running = 0.0f;
        for (int h = top; h < bottom; ++h)
            for (int w = left; w < right; ++w) total += plane[(size_t)(h * width + w) * channels];
        const float limit = chance[i] * total;
        int where = -1;
        for (int h = top; h < bottom && where < 0; ++h)
            for (int w = left; w < right && where < 0; ++w) {
                running += plane[(size_t)(h * width + w) * channels];
                if (running >= limit) where = h * width + w;
            }
        if (where < 0) where = (bottom - 1) * width + right - 1;
        y[i] = plane[(size_t)where * channels];
        mask[i] = where;
    }
}

// Pooling over channels-last arrays. Windows are Caffe's: clipped to the image for the maximum; for the average the area counts
// padding but ends at size + pad. One thread takes V neighbouring channels; gradients are gathered, so no atomics are needed.

struct Windows {
    int channels, height, width, out_height, out_width;
    int kernel_h, kernel_w, stride_h, stride_w, pad_h, pad_w;
};

#define WINDOWS int channels, int height, int width, int out_height, int out_width, int kernel_h, int kernel_w, \
    int stride_h, int stride_w, int pad_h, int pad_w
#define MAKE_WINDOWS Windows g = {channels, height, width, out_height, out_width, kernel_h, kernel_w, \
    stride_h, stride_w, pad_h, pad_w}

template <typename T, int V>
struct alignas(sizeof(T) * V) Lanes {
    T v[V];
};

// Place of pack i of an array (N, rows, columns, packs).
struct Place {
    int n, row, column, pack;
    __device__ Place(unsigned int i, int rows, int columns, int packs) {
        pack = i % packs;
        i /= packs;
        column = i % columns;
        i /= columns;
        row = i % rows;
        n = i / rows;
    }
};

__device__ __forceinline__ size_t offset(int n, int row, int column, int pack, int rows, int columns, int packs) {
    return (((size_t)n * rows + row) * columns + column) * packs + pack;
}

// First and one past the last window that contains a place.
__device__ __forceinline__ int first_window(int place, int kernel, int stride) {
    return place < kernel ? 0 : (place - kernel) / stride + 1;
}

__device__ __forceinline__ int last_window(int place, int stride, int windows) { return min(place / stride + 1, windows); }

// Caffe's divisor of an average.
__device__ __forceinline__ int area(const Windows &g, int row, int column) {
    const int top = row * g.stride_h - g.pad_h, left = column * g.stride_w - g.pad_w;
    return (min(top + g.kernel_h, g.height + g.pad_h) - top) * (min(left + g.kernel_w, g.width + g.pad_w) - left);
}

template <int V>
__device__ void max_forward(const float *x, float *y, int *mask, Windows g, unsigned int count) {
    typedef Lanes<float, V> Values;
    const int packs = g.channels / V;
    EACH_INDEX(i, count) {
        const Place p(i, g.out_height, g.out_width, packs);
        const int top = p.row * g.stride_h - g.pad_h, left = p.column * g.stride_w - g.pad_w;
        const int bottom = min(top + g.kernel_h, g.height), right = min(left + g.kernel_w, g.width);
        Values best;
        Lanes<int, V> where;
        for (int k = 0; k < V; ++k) best.v[k] = -3.402823466e+38f, where.v[k] = -1;
        for (int h = max(top, 0); h < bottom; ++h) {
            for (int w = max(left, 0); w < right; ++w) {
                const Values values =
                    reinterpret_cast<const Values *>(x)[offset(p.n, h, w, p.pack, g.height, g.width, packs)];
                for (int k = 0; k < V; ++k)
                    if (values.v[k] > best.v[k]) best.v[k] = values.v[k], where.v[k] = h * g.width + w;
            }
        }
        reinterpret_cast<Values *>(y)[i] = best;
        reinterpret_cast<Lanes<int, V> *>(mask)[i] = where;
    }
}

template <int V>
__device__ void max_backward(const float *dy, const int *mask, float *dx, Windows g, unsigned int count) {
    typedef Lanes<float, V> Values;
    const int packs = g.channels / V;
    EACH_INDEX(i, count) {
        const Place p(i, g.height, g.width, packs);
        const int h = p.row + g.pad_h, w = p.column + g.pad_w, here = p.row * g.width + p.column;
        const int bottom = last_window(h, g.stride_h, g.out_height), right = last_window(w, g.stride_w, g.out_width);
        Values sum = {};
        for (int row = first_window(h, g.kernel_h, g.stride_h); row < bottom; ++row) {
            for (int column = first_window(w, g.kernel_w, g.stride_w); column < right; ++column) {
                const size_t at = offset(p.n, row, column, p.pack, g.out_height, g.out_width, packs);
                const Values gradient = reinterpret_cast<const Values *>(dy)[at];
                const Lanes<int, V> where = reinterpret_cast<const Lanes<int, V> *>(mask)[at];
                for (int k = 0; k < V; ++k) sum.v[k] += where.v[k] == here ? gradient.v[k] : 0.0f;
            }
        }
        reinterpret_cast<Values *>(dx)[i] = sum;
    }
}

template <int V>
__device__ void average_forward(const float *x, float *y, Windows g, unsigned int count) {
    typedef Lanes<float, V> Values;
    const int packs = g.channels / V;
    EACH_INDEX(i, count) {
        const Place p(i, g.out_height, g.out_width, packs);
        const int top = p.row * g.stride_h - g.pad_h, left = p.column * g.stride_w - g.pad_w;
        const int bottom = min(top + g.kernel_h, g.height), right = min(left + g.kernel_w, g.width);
        Values sum = {};
        for (int h = max(top, 0); h < bottom; ++h) {
            for (int w = max(left, 0); w < right; ++w) {
                const Values values =
                    reinterpret_cast<const Values *>(x)[offset(p.n, h, w, p.pack, g.height, g.width, packs)];
                for (int k = 0; k < V; ++k) sum.v[k] += values.v[k];
            }
        }
        const float size = (float)area(g, p.row, p.column);
        for (int k = 0; k < V; ++k) sum.v[k] /= size;
        reinterpret_cast<Values *>(y)[i] = sum;
    }
}

template <int V>
__device__ void average_backward(const float *dy, float *dx, Windows g, unsigned int count) {
    typedef Lanes<float, V> Values;
    const int packs = g.channels / V;
    EACH_INDEX(i, count) {
        const Place p(i, g.height, g.width, packs);
        const int h = p.row + g.pad_h, w = p.column + g.pad_w;
        const int bottom = last_window(h, g.stride_h, g.out_height), right = last_window(w, g.stride_w, g.out_width);
        Values sum = {};
        for (int row = first_window(h, g.kernel_h, g.stride_h); row < bottom; ++row) {
            for (int column = first_window(w, g.kernel_w, g.stride_w); column < right; ++column) {
                const Values gradient = reinterpret_cast<const Values *>(
                    dy)[offset(p.n, row, column, p.pack, g.out_height, g.out_width, packs)];
                const float size = (float)area(g, row, column);
                for (int k = 0; k < V; ++k) sum.v[k] += gradient.v[k] / size;
            }
        }
        reinterpret_cast<Values *>(dx)[i] = sum;
    }
}

#define POOLING(V)                                                                                                   \
    extern "C" __global__ void max_forward_##V(const float *x, float *y, int *mask, WINDOWS, unsigned int count) {   \
        MAKE_WINDOWS;                                                                                                \
        max_forward<V>(x, y, mask, g, count);                                                                        \
    }                                                                                                                \
    extern "C" __global__ void max_backward_##V(const float *dy, const int *mask, float *dx, WINDOWS,                \
                                                unsigned int count) {                                                \
        MAKE_WINDOWS;                                                                                                \
        max_backward<V>(dy, mask, dx, g, count);                                                                     \
    }                                                                                                                \
    extern "C" __global__ void average_forward_##V(const float *x, float *y, WINDOWS, unsigned int count) {          \
        MAKE_WINDOWS;                                                                                                \
        average_forward<V>(x, y, g, count);                                                                          \
    }                                                                                                                \
    extern "C" __global__ void average_backward_##V(const float *dy, float *dx, WINDOWS, unsigned int count) {       \
        MAKE_WINDOWS;                                                                                                \
        average_backward<V>(dy, dx, g, count);                                                                       \
    }

POOLING(1)
POOLING(4)

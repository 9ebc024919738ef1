// Pooling over channels-last arrays. Windows are Caffe's: clipped to the image for the maximum; for the average the area counts
// padding but ends at size + pad. The text before defines STORED, WIDTH (the channels of a thread), TILES (whether gradients go
// by tiles or by pixels), the geometry (KERNEL_H, KERNEL_W, STRIDE_H, STRIDE_W, PAD_H, PAD_W) and for the maximum TOGETHER and
// MASK (int: pixel in the plane; unsigned char: number in the window), without which the kernels are those of the average.
// Loads come before what needs them, so that a thread has many on their way. Gradients are gathered: no atomics are needed.

typedef Pack<STORED, WIDTH> Raw;
typedef Pack<float, WIDTH> Values;
#ifdef MASK
typedef Pack<MASK, WIDTH> Codes;
#endif

struct Sizes {
    int height, width, out_height, out_width, packs;
    // Numbers of packs; there are fewer than 2^31.
    __device__ __forceinline__ unsigned int in(int n, int row, int column, int pack) const {
        return ((n * height + row) * width + column) * packs + pack;
    }
    __device__ __forceinline__ unsigned int out(int n, int row, int column, int pack) const {
        return ((n * out_height + row) * out_width + column) * packs + pack;
    }
};

struct Place {
    int n, row, column, pack;
};

// The kernels' arguments, and how a thread's number becomes a pixel among `rows` x `columns` x `packs`.
#define SIZES int height, int width, int out_height, int out_width, unsigned int packs, Divider by_packs, \
    unsigned int columns, Divider by_columns, unsigned int rows, Divider by_rows, unsigned int count
#define FIND_PLACE                                                                                                     \
    const unsigned int number = blockIdx.x * blockDim.x + threadIdx.x;                                                 \
    if (number >= count) return;                                                                                       \
    const unsigned int over_pack = by_packs(number), over_column = by_columns(over_pack), over_row = by_rows(over_column); \
    const Place p = {(int)over_row, (int)(over_column - over_row * rows), (int)(over_pack - over_column * columns),    \
                     (int)(number - over_pack * packs)};                                                               \
    const Sizes s = {height, width, out_height, out_width, (int)packs};

// Small windows are written out in full; of large ones a few columns at a time.
constexpr bool SMALL = KERNEL_H * KERNEL_W <= 9;
constexpr int SPAN = SMALL || KERNEL_W < 8 ? KERNEL_W : 8;
constexpr int UNROLL = SMALL ? KERNEL_H + STRIDE_H : 1;

__device__ __forceinline__ bool within(int i, int size) { return (unsigned int)i < (unsigned int)size; }

// The pixel nearest to i; loads from there need no branch, and nobody asks for more than a repetition or nothing.
__device__ __forceinline__ int nearest(int i, int size) { return min(max(i, 0), size - 1); }

#ifdef MASK

// TOGETHER output rows are one thread's: windows that overlap share what they load.

// Number of a pixel in its window; without padding it is known before, as repetitions at the end are never the first maximum.
__device__ __forceinline__ int number_of(int kernel_row, int kernel_column, int row, int column, int top, int left) {
    return (PAD_H ? row - top : kernel_row) * KERNEL_W + (PAD_W ? column - left : kernel_column);
}

// Searches the windows that begin at row `top`. CAREFUL: NaN passes on; else it is passed over, and so one comparison is enough.
// Returns NaN where a value is NaN or infinite.
template <bool CAREFUL>
__device__ __forceinline__ float search(const STORED *x, const Place &p, const Sizes &s, int top, int left,
                                        Values (&best)[TOGETHER], Pack<int, WIDTH> (&where)[TOGETHER]) {
    float poison = 0;
#pragma unroll
    for (int r = 0; r < TOGETHER; ++r)
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) best[r][k] = -3.402823466e+38f, where[r][k] = -1;
#pragma unroll UNROLL
    for (int h = 0; h < (TOGETHER - 1) * STRIDE_H + KERNEL_H; ++h) {
        const int row = nearest(top + h, s.height);
#pragma unroll UNROLL
        for (int from = 0; from < KERNEL_W; from += SPAN) {
            Raw raw[SPAN];
            int column[SPAN];
#pragma unroll
            for (int c = 0; c < SPAN; ++c) {
                column[c] = nearest(left + min(from + c, KERNEL_W - 1), s.width);
                raw[c] = load_raw<WIDTH>(x, s.in(p.n, row, column[c], p.pack));
            }
#pragma unroll
            for (int c = 0; c < SPAN; ++c) {
                // One multiplication finds both: NaN and infinity times 0 are NaN, and NaN stays.
#pragma unroll
                for (int k = 0; k < WIDTH; ++k) poison = fmaf(to_float(raw[c][k]), 0.0f, poison);
#pragma unroll
                for (int r = 0; r < TOGETHER; ++r) {
                    const int i = h - r * STRIDE_H;
                    if (i < 0 || i >= KERNEL_H) continue;
                    const int code = sizeof(MASK) == 1 ? number_of(i, from + c, row, column[c], top + r * STRIDE_H, left)
                                                       : row * s.width + column[c];
#pragma unroll
                    for (int k = 0; k < WIDTH; ++k) {
                        const float value = to_float(raw[c][k]);
                        if (CAREFUL ? wins(value, best[r][k]) : value > best[r][k]) best[r][k] = value, where[r][k] = code;
                    }
                }
            }
        }
    }
    return poison;
}

extern "C" __global__ void max_forward(const STORED *x, STORED *y, MASK *mask, SIZES) {
    FIND_PLACE
    const int first = p.row * TOGETHER, top = first * STRIDE_H - PAD_H, left = p.column * STRIDE_W - PAD_W;
    Values best[TOGETHER];
    Pack<int, WIDTH> where[TOGETHER];
    const float poison = search<false>(x, p, s, top, left, best, where);
    // The careful search costs more comparisons for each value, and is needed only where a value is NaN or infinite.
    if (poison != poison) search<true>(x, p, s, top, left, best, where);
#pragma unroll
    for (int r = 0; r < TOGETHER; ++r) {
        if (first + r >= out_height) return;
        Codes codes;
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) codes[k] = (MASK)where[r][k];
        const unsigned int at = s.out(p.n, first + r, p.column, p.pack);
        store<WIDTH>(y, at, best[r]);
        store_raw(mask, at, codes);
    }
}

#else

// Caffe's divisor of an average.
__device__ __forceinline__ float area(Sizes s, int row, int column) {
    const int top = row * STRIDE_H - PAD_H, left = column * STRIDE_W - PAD_W;
    return (float)((min(top + KERNEL_H, s.height + PAD_H) - top) * (min(left + KERNEL_W, s.width + PAD_W) - left));
}

// The sum over a window that begins at (top, left); WHOLE if none of it is outside of the image.
template <bool WHOLE>
__device__ __forceinline__ Values window_sum(const STORED *x, Place p, Sizes s, int top, int left) {
    Values sum = {};
#pragma unroll UNROLL
    for (int h = 0; h < KERNEL_H; ++h) {
#pragma unroll UNROLL
        for (int from = 0; from < KERNEL_W; from += SPAN) {
            Words<STORED, WIDTH> raw[SPAN];
#pragma unroll
            for (int c = 0; c < SPAN; ++c) {
                raw[c].clear();
                if (from + c < KERNEL_W && (WHOLE || (within(top + h, s.height) && within(left + from + c, s.width))))
                    raw[c].load(x + (size_t)s.in(p.n, top + h, left + from + c, p.pack) * WIDTH);
            }
#pragma unroll
            for (int c = 0; c < SPAN; ++c)
#pragma unroll
                for (int k = 0; k < WIDTH; ++k) sum[k] += raw[c][k];
        }
    }
    return sum;
}

extern "C" __global__ void average_forward(const STORED *x, STORED *y, SIZES) {
    FIND_PLACE
    const int top = p.row * STRIDE_H - PAD_H, left = p.column * STRIDE_W - PAD_W;
    const bool whole = top >= 0 && left >= 0 && top + KERNEL_H <= height && left + KERNEL_W <= width;
    Values sum = whole ? window_sum<true>(x, p, s, top, left) : window_sum<false>(x, p, s, top, left);
    const float size = area(s, p.row, p.column);
#pragma unroll
    for (int k = 0; k < WIDTH; ++k) sum[k] = __fdividef(sum[k], size);
    store<WIDTH>(y, s.out(p.n, p.row, p.column, p.pack), sum);
}

#endif

#if TILES

// Gradients by tiles. A tile is as large as the stride and begins where a window begins, so which windows reach its pixels, and
// where, is known before: the NEAR windows that end with the tile's own.
constexpr int NEAR_H = (KERNEL_H - 1) / STRIDE_H + 1, NEAR_W = (KERNEL_W - 1) / STRIDE_W + 1, NEAR = NEAR_H * NEAR_W;

// Row and column of near window number a, and whether there is one.
__device__ __forceinline__ int near_row(Place p, int a) { return p.row - (NEAR_H - 1) + a / NEAR_W; }
__device__ __forceinline__ int near_column(Place p, int a) { return p.column - (NEAR_W - 1) + a % NEAR_W; }
__device__ __forceinline__ bool exists(Place p, Sizes s, int a) {
    return within(near_row(p, a), s.out_height) && within(near_column(p, a), s.out_width);
}

// Packs of the near windows; for one that does not exist, of another.
template <typename T>
__device__ __forceinline__ void load_near(const T *from, Place p, Sizes s, Pack<T, WIDTH> (&to)[NEAR]) {
#pragma unroll
    for (int a = 0; a < NEAR; ++a) {
        // A load that always happens needs no branch; `exists` decides later whether it counts.
        const int row = nearest(near_row(p, a), s.out_height), column = nearest(near_column(p, a), s.out_width);
        to[a] = load_raw<WIDTH>(from, s.out(p.n, row, column, p.pack));
    }
}

// dx = for each pixel (h, w) of a tile what add(sum, a, number of the pixel in near window a, h, w) adds up.
template <typename F>
__device__ __forceinline__ void gather(STORED *dx, Place p, Sizes s, F add) {
#pragma unroll
    for (int i = 0; i < STRIDE_H; ++i) {
#pragma unroll
        for (int j = 0; j < STRIDE_W; ++j) {
            const int h = p.row * STRIDE_H - PAD_H + i, w = p.column * STRIDE_W - PAD_W + j;
            Values sum = {};
#pragma unroll
            for (int a = 0; a < NEAR; ++a) {
                const int row = i + (NEAR_H - 1 - a / NEAR_W) * STRIDE_H, column = j + (NEAR_W - 1 - a % NEAR_W) * STRIDE_W;
                if (row < KERNEL_H && column < KERNEL_W) add(sum, a, row * KERNEL_W + column, h, w);
            }
            if (within(h, s.height) && within(w, s.width)) store<WIDTH>(dx, s.in(p.n, h, w, p.pack), sum);
        }
    }
}

#ifdef MASK

extern "C" __global__ void max_backward(const STORED *dy, const MASK *mask, STORED *dx, SIZES) {
    FIND_PLACE
    Raw gradient[NEAR];
    Codes codes[NEAR];
    load_near(mask, p, s, codes);
    load_near(dy, p, s, gradient);
    gather(dx, p, s, [&](Values &sum, int a, int number, int h, int w) {
        const int code = !exists(p, s, a) ? -2 : sizeof(MASK) == 1 ? number : h * width + w;
#pragma unroll
        for (int k = 0; k < WIDTH; ++k)
            if ((int)codes[a][k] == code) sum[k] += to_float(gradient[a][k]);
    });
}

#else

extern "C" __global__ void average_backward(const STORED *dy, STORED *dx, SIZES) {
    FIND_PLACE
    Raw gradient[NEAR];
    load_near(dy, p, s, gradient);
    Values parts[NEAR];
#pragma unroll
    for (int a = 0; a < NEAR; ++a) {
        const float part = __fdividef(1.0f, area(s, near_row(p, a), near_column(p, a)));
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) parts[a][k] = exists(p, s, a) ? to_float(gradient[a][k]) * part : 0.0f;
    }
    gather(dx, p, s, [&](Values &sum, int a, int, int, int) {
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) sum[k] += parts[a][k];
    });
}

#endif

#else

// Gradients by pixels, for large windows and strides. First and one past the last window that contains a pixel.
__device__ __forceinline__ int first_window(int place, int kernel, int stride) {
    return place < kernel ? 0 : (place - kernel) / stride + 1;
}

__device__ __forceinline__ int last_window(int place, int stride, int windows) { return min(place / stride + 1, windows); }

#define EACH_WINDOW(row, column)                                                                           \
    const int h = p.row + PAD_H, w = p.column + PAD_W;                                                     \
    for (int row = first_window(h, KERNEL_H, STRIDE_H); row < last_window(h, STRIDE_H, out_height); ++row) \
        for (int column = first_window(w, KERNEL_W, STRIDE_W); column < last_window(w, STRIDE_W, out_width); ++column)

#ifdef MASK

extern "C" __global__ void max_backward(const STORED *dy, const MASK *mask, STORED *dx, SIZES) {
    FIND_PLACE
    Values sum = {};
    EACH_WINDOW(row, column) {
        const unsigned int at = s.out(p.n, row, column, p.pack);
        const int number = (h - row * STRIDE_H) * KERNEL_W + w - column * STRIDE_W;
        const MASK code = (MASK)(sizeof(MASK) == 1 ? number : p.row * width + p.column);
        const Values gradient = load<WIDTH>(dy, at);
        const Codes codes = load_raw<WIDTH>(mask, at);
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) sum[k] += codes[k] == code ? gradient[k] : 0.0f;
    }
    store<WIDTH>(dx, s.in(p.n, p.row, p.column, p.pack), sum);
}

#else

extern "C" __global__ void average_backward(const STORED *dy, STORED *dx, SIZES) {
    FIND_PLACE
    Values sum = {};
    EACH_WINDOW(row, column) {
        const Values gradient = load<WIDTH>(dy, s.out(p.n, row, column, p.pack));
        const float part = __fdividef(1.0f, area(s, row, column));
#pragma unroll
        for (int k = 0; k < WIDTH; ++k) sum[k] += gradient[k] * part;
    }
    store<WIDTH>(dx, s.in(p.n, p.row, p.column, p.pack), sum);
}

#endif

#endif

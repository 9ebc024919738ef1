// Comparison of two images at displacements, and bilinear sampling at positions, over channels-last arrays of float32.

// Patches and displacements; the members have the order of CorrelationWindow.numbers.
struct Window {
    int size, stride, top, left, first_row, first_column, shift_rows, shift_columns, step, subtract;
    __device__ __forceinline__ int shifts() const { return shift_rows * shift_columns; }
    __device__ __forceinline__ int down(int shift) const { return first_row + shift / shift_columns * step; }
    __device__ __forceinline__ int right(int shift) const { return first_column + shift % shift_columns * step; }
};

#define WINDOW_PARAMETERS                                                                                            \
    int size, int stride, int top, int left, int first_row, int first_column, int shift_rows, int shift_columns, int step, \
        int subtract
#define WINDOW {size, stride, top, left, first_row, first_column, shift_rows, shift_columns, step, subtract}

struct Image {
    int channels, height, width;
    __device__ __forceinline__ bool has(int h, int w) const { return h >= 0 && h < height && w >= 0 && w < width; }
    __device__ __forceinline__ size_t at(int sample, int h, int w) const {
        return (((size_t)sample * height + h) * width + w) * channels;
    }
};

#define IMAGE_PARAMETERS int channels, int height, int width
#define IMAGE {channels, height, width}

// A warp computes one pixel of y. Lane k keeps displacement k of each group of 32, so that the group is stored at once.
extern "C" __global__ void correlate(const float *a, const float *b, float *y, IMAGE_PARAMETERS, int rows, int columns,
                                     WINDOW_PARAMETERS, float scale, unsigned int pixels) {
    const Image image = IMAGE;
    const Window window = WINDOW;
    const int lane = threadIdx.x % 32, shifts = window.shifts();
    const unsigned int warps = gridDim.x * (blockDim.x / 32);
    for (unsigned int pixel = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; pixel < pixels; pixel += warps) {
        const int sample = pixel / (rows * columns);
        const int upper = (int)(pixel / columns % rows) * window.stride + window.top;
        const int outer = (int)(pixel % columns) * window.stride + window.left;
        float kept = 0.0f;
        for (int shift = 0; shift < shifts; ++shift) {
            const int down = window.down(shift), right = window.right(shift);
            float total = 0.0f;
            for (int number = 0; number < window.size * window.size; ++number) {
                const int h = upper + number / window.size, w = outer + number % window.size;
                const bool in_a = image.has(h, w), in_b = image.has(h + down, w + right);
                if (!(in_a && in_b) && !(window.subtract && (in_a || in_b))) continue;
                const float *from_a = a + (in_a ? image.at(sample, h, w) : 0);
                const float *from_b = b + (in_b ? image.at(sample, h + down, w + right) : 0);
                for (int c = lane; c < image.channels; c += 32) {
                    const float left_value = in_a ? from_a[c] : 0.0f, right_value = in_b ? from_b[c] : 0.0f;
                    total += window.subtract ? fabsf(left_value - right_value) : left_value * right_value;
                }
            }
            total = warp_sum(total);
            // Every lane has the sum. Each keeps one in 32, so that the warp writes 32 neighbours at once.
            if (shift % 32 == lane) kept = total * scale;
            if ((shift % 32 == 31 || shift == shifts - 1) && lane <= shift % 32)
                y[(size_t)pixel * shifts + shift - shift % 32 + lane] = kept;
        }
    }
}

// The gradient by `own`, which is the first image, or the second if `second` is 1.
extern "C" __global__ void correlate_gradient(const float *dy, const float *own, const float *other, float *gradient,
                                              IMAGE_PARAMETERS, int rows, int columns, WINDOW_PARAMETERS, float scale,
                                              int second, unsigned int count) {
    const Image image = IMAGE;
    const Window window = WINDOW;
    const int shifts = window.shifts();
    EACH_INDEX(index, count) {
        const int c = index % image.channels, pixel = index / image.channels;
        const int sample = pixel / (image.height * image.width);
        const int row = pixel / image.width % image.height, column = pixel % image.width;
        float sum = 0.0f;
        for (int shift = 0; shift < shifts; ++shift) {
            const int down = window.down(shift), right = window.right(shift);
            const int h = row - second * down, w = column - second * right;
            const int other_h = h + (1 - second) * down, other_w = w + (1 - second) * right;
            const bool inside = image.has(other_h, other_w);
            if (!inside && !window.subtract) continue;
            float total = 0.0f;
            for (int number = 0; number < window.size * window.size; ++number) {
                const int below = h - window.top - number / window.size, beyond = w - window.left - number % window.size;
                if (below < 0 || beyond < 0 || below % window.stride || beyond % window.stride) continue;
                const int i = below / window.stride, j = beyond / window.stride;
                if (i < rows && j < columns) total += dy[(((size_t)sample * rows + i) * columns + j) * shifts + shift];
            }
            const float value = inside ? other[image.at(sample, other_h, other_w) + c] : 0.0f;
            if (window.subtract) {
                const float distance = own[index] - value;
                sum += distance > 0.0f ? total : (distance < 0.0f ? -total : 0.0f);
            } else {
                sum += total * value;
            }
        }
        gradient[index] = sum * scale;
    }
}

// -- sampling --------------------------------------------------------------------------------------------------------------

enum { ZERO, INSIDE, REPEAT };

// How a position along one axis reads the pixels: weights of the pixel at or before it and of the next one, and the derivatives of
// the weights of the previous, of this and of the next pixel.
struct Taps {
    bool known;
    int first;
    float weight, next_weight, slope_before, slope, next_slope;

    __device__ __forceinline__ Taps(float position, int size, int border) {
        known = border == ZERO ? position > -1.0f : position >= 0.0f;
        known = known && (border == INSIDE ? position <= (float)(size - 1) : position < (float)size);
        first = known ? (int)floorf(position) : 0;
        const float fraction = known ? position - (float)first : 0.0f;
        const bool has_this = known && first >= 0, has_next = known && first + 1 < size;
        weight = has_this ? 1.0f - fraction : 0.0f;
        next_weight = has_next ? fraction : 0.0f;
        if (border == REPEAT && known && !has_next) weight = 1.0f;
        slope_before = 0.0f;
        next_slope = has_next ? 1.0f : 0.0f;
        slope = border == ZERO ? (has_this ? -1.0f : 0.0f) : -next_slope;
        if (border == INSIDE && fraction == 0.0f) {
            slope_before = known && first > 0 ? -0.5f : 0.0f;
            slope = -slope_before - 0.5f * next_slope;
            next_slope *= 0.5f;
        }
    }
};

__device__ __forceinline__ int clipped(int index, int size) { return min(max(index, 0), size - 1); }

extern "C" __global__ void sample_forward(const float *x, const float *positions, float *y, IMAGE_PARAMETERS, int pixels,
                                          int border, float fill, unsigned int count) {
    const Image image = IMAGE;
    EACH_INDEX(index, count) {
        const int c = index % image.channels, pixel = index / image.channels, sample = pixel / pixels;
        const Taps w(positions[2 * (size_t)pixel], image.width, border);
        const Taps h(positions[2 * (size_t)pixel + 1], image.height, border);
        float result = fill;
        if (w.known && h.known) {
            const int w0 = clipped(w.first, image.width), w1 = clipped(w.first + 1, image.width);
            const int h0 = clipped(h.first, image.height), h1 = clipped(h.first + 1, image.height);
            const float *plane = x + c;
            result = h.weight * (w.weight * plane[image.at(sample, h0, w0)] + w.next_weight * plane[image.at(sample, h0, w1)]) +
                     h.next_weight *
                         (w.weight * plane[image.at(sample, h1, w0)] + w.next_weight * plane[image.at(sample, h1, w1)]);
        }
        y[index] = result;
    }
}

// The largest absolute value as the bits of a float, whose order is that of integers; NaN is the largest. `largest` begins at 0.
extern "C" __global__ void largest_size(const float *dy, int *largest, unsigned int count) {
    int found = 0;
    EACH_INDEX(i, count) found = max(found, __float_as_int(dy[i]) & 0x7fffffff);
    for (int offset = 16; offset > 0; offset /= 2) found = max(found, __shfl_xor_sync(0xffffffffu, found, offset));
    if (threadIdx.x % 32 == 0) atomicMax(largest, found);
}

// The exponent of 2 that makes integers of the gradients: below 2^40 each, so that 2^23 of them cannot overflow.
__device__ __forceinline__ int fixed_exponent(int largest) {
    int exponent;
    frexpf(__int_as_float(largest), &exponent);
    return 40 - exponent;
}

// Sums of integers do not depend on the order of the atomics. `sums` begins at 0.
extern "C" __global__ void scatter_samples(const float *positions, const float *dy, const int *largest, unsigned long long *sums,
                                           IMAGE_PARAMETERS, int pixels, int border, unsigned int count) {
    const Image image = IMAGE;
    const int exponent = fixed_exponent(*largest);
    EACH_INDEX(index, count) {
        const int c = index % image.channels, pixel = index / image.channels, sample = pixel / pixels;
        const Taps w(positions[2 * (size_t)pixel], image.width, border);
        const Taps h(positions[2 * (size_t)pixel + 1], image.height, border);
        if (!w.known || !h.known) continue;
        const double d = ldexp((double)dy[index], exponent);
        for (int k = 0; k < 4; ++k) {
            const float weight = (k < 2 ? h.weight : h.next_weight) * (k % 2 ? w.next_weight : w.weight);
            const int row = clipped(h.first + k / 2, image.height), column = clipped(w.first + k % 2, image.width);
            if (weight != 0.0f)
                // Two's complement: negative numbers add up as unsigned ones.
                atomicAdd(sums + image.at(sample, row, column) + c, (unsigned long long)__double2ll_rn(d * (double)weight));
        }
    }
}

extern "C" __global__ void finish_samples(const unsigned long long *sums, const int *largest, float *dx, unsigned int count) {
    const int exponent = fixed_exponent(*largest);
    const bool finite = *largest < 0x7f800000;
    EACH_INDEX(i, count) dx[i] = finite ? (float)ldexp((double)(long long)sums[i], -exponent) : __int_as_float(0x7fffffff);
}

// A warp computes the two derivatives of one pixel.
extern "C" __global__ void position_gradient(const float *x, const float *positions, const float *dy, float *gradient,
                                             IMAGE_PARAMETERS, int pixels, int border, unsigned int count) {
    const Image image = IMAGE;
    const unsigned int warps = gridDim.x * (blockDim.x / 32);
    for (unsigned int pixel = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32; pixel < count; pixel += warps) {
        const Taps w(positions[2 * (size_t)pixel], image.width, border);
        const Taps h(positions[2 * (size_t)pixel + 1], image.height, border);
        const int sample = pixel / pixels;
        float by_x = 0.0f, by_y = 0.0f;
        if (w.known && h.known) {
            const int columns[3] = {clipped(w.first - 1, image.width), clipped(w.first, image.width),
                                    clipped(w.first + 1, image.width)};
            const int rows[3] = {clipped(h.first - 1, image.height), clipped(h.first, image.height),
                                 clipped(h.first + 1, image.height)};
            for (int c = threadIdx.x % 32; c < image.channels; c += 32) {
                const float d = dy[(size_t)pixel * image.channels + c];
                float v[3][3];
#pragma unroll
                for (int i = 0; i < 3; ++i)
#pragma unroll
                    for (int j = 0; j < 3; ++j) v[i][j] = i + j == 0 ? 0.0f : x[image.at(sample, rows[i], columns[j]) + c];
                by_x += d * (h.weight * (w.slope_before * v[1][0] + w.slope * v[1][1] + w.next_slope * v[1][2]) +
                             h.next_weight * (w.slope_before * v[2][0] + w.slope * v[2][1] + w.next_slope * v[2][2]));
                by_y += d * (h.slope_before * (w.weight * v[0][1] + w.next_weight * v[0][2]) +
                             h.slope * (w.weight * v[1][1] + w.next_weight * v[1][2]) +
                             h.next_slope * (w.weight * v[2][1] + w.next_weight * v[2][2]));
            }
        }
        by_x = warp_sum(by_x);
        by_y = warp_sum(by_y);
        if (threadIdx.x % 32 == 0) gradient[2 * (size_t)pixel] = by_x, gradient[2 * (size_t)pixel + 1] = by_y;
    }
}

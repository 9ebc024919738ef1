// Windows of channels-last arrays as rows of a matrix, and back. The text before this file defines the type Element and constants:
// AXES; SIZE, OUT, KERNEL, STRIDE, PAD, DILATION (one entry a spatial axis); CHANNELS of the array and GROUP_CHANNELS of one
// group. x is (N, SIZE..., CHANNELS); columns is (N, OUT..., KERNEL..., GROUP_CHANNELS) for the group that starts at channel
// `first`, in x's own type on the way there and float32 on the way back. Rows of columns are windows; a part of the windows
// begins at the window `start`.

__device__ __forceinline__ unsigned int product(const int *values) {
    unsigned int result = 1;
    for (int a = 0; a < AXES; ++a) result *= values[a];
    return result;
}

// columns = windows of x, 0 outside; one thread an element of columns.
extern "C" __global__ void im2col(const Element *x, Element *columns, int first, unsigned int start, unsigned int count) {
    EACH_INDEX(i, count) {
        unsigned int rest = i / GROUP_CHANNELS;
        int place[AXES];
        for (int a = AXES - 1; a >= 0; --a) {
            place[a] = (int)(rest % KERNEL[a]) * DILATION[a] - PAD[a];
            rest /= KERNEL[a];
        }
        rest += start;
        for (int a = AXES - 1; a >= 0; --a) {
            place[a] += (int)(rest % OUT[a]) * STRIDE[a];
            rest /= OUT[a];
        }
        bool inside = true;
        unsigned int offset = rest;
        for (int a = 0; a < AXES; ++a) {
            inside = inside && place[a] >= 0 && place[a] < SIZE[a];
            offset = offset * SIZE[a] + place[a];
        }
        columns[i] = inside ? x[(size_t)offset * CHANNELS + first + i % GROUP_CHANNELS] : Element{};
    }
}

// x (this group's channels) = sum over the windows from `start` to `stop` that contain a pixel, added to x with `add`; for
// the pixels from `begin` on; one thread an element of x, so no atomics.
extern "C" __global__ void col2im(
    const float *columns, Element *x, int first, unsigned int begin, unsigned int start, unsigned int stop, int add,
    unsigned int count) {
    const unsigned int window = product(KERNEL);
    EACH_INDEX(i, count) {
        const unsigned int c = i % GROUP_CHANNELS;
        unsigned int rest = begin + i / GROUP_CHANNELS;
        const unsigned int at = rest;
        int place[AXES];
        for (int a = AXES - 1; a >= 0; --a) {
            place[a] = (int)(rest % SIZE[a]) + PAD[a];
            rest /= SIZE[a];
        }
        float sum = 0.0f;
        for (unsigned int k = 0; k < window; ++k) {
            unsigned int left = k;
            int out[AXES];
            bool inside = true;
            for (int a = AXES - 1; a >= 0; --a) {
                const int from = place[a] - (int)(left % KERNEL[a]) * DILATION[a];
                left /= KERNEL[a];
                out[a] = from / STRIDE[a];
                inside = inside && from >= 0 && from % STRIDE[a] == 0 && out[a] < OUT[a];
            }
            if (!inside) continue;
            size_t row = rest;
            for (int a = 0; a < AXES; ++a) row = row * OUT[a] + out[a];
            if (row < start || row >= stop) continue;
            sum += columns[((row - start) * window + k) * GROUP_CHANNELS + c];
        }
        Element *target = x + (size_t)at * CHANNELS + first + c;
        *target = Rounded<Element>::one(add ? sum + to_float(*target) : sum);
    }
}

// Decoded images become crops: resized by one of OpenCV's interpolations, cropped, from RGB to planes of BGR.

#define NEAREST 0
#define LINEAR 1
#define CUBIC 2

// A decoded image and the place of its crop; no image where `pixels` is 0. Strides are in bytes. `rows` and `columns`
// are those of the resized image, `top` and `left` those of the crop in it.
struct Job {
    long long pixels, row_stride, column_stride, channel_stride, height, width, rows, columns, top, left, interpolation;
};

// The pixels along one axis that a resized pixel depends on: `count` from `first` on. For AREA, `begin` and `end` bound
// its part of the axis; else `begin` is its position from the first pixel's center on.
struct Taps {
    int first, count;
    float begin, end;
};

__device__ Taps taps_of(int interpolation, int position, int resized, int length) {
    const float scale = (float)length / (float)resized;
    if (resized == length || interpolation == NEAREST) {
        const double step = 1.0 / ((double)resized / (double)length);  // rounds as OpenCV's
        const int nearest = resized == length ? position : (int)floor(position * step);
        return {min(nearest, length - 1), 1, 0.0f, 0.0f};
    }
    if (interpolation == LINEAR || interpolation == CUBIC) {
        const float center = (position + 0.5f) * scale - 0.5f, below = floorf(center);
        const int before = interpolation == CUBIC ? 1 : 0;
        return {(int)below - before, 2 + 2 * before, center - below, 0.0f};
    }
    const float begin = position * scale, end = fminf(begin + scale, (float)length);
    const int first = (int)floorf(begin);
    return {first, max((int)ceilf(end) - first, 1), begin, end};
}

// The cubic kernel with A = -0.75, at a distance from 0 to 2.
__device__ __forceinline__ float cubic(float distance) {
    const float a = -0.75f;
    if (distance <= 1.0f) return ((a + 2.0f) * distance - (a + 3.0f)) * distance * distance + 1.0f;
    return ((a * distance - 5.0f * a) * distance + 8.0f * a) * distance - 4.0f * a;
}

__device__ __forceinline__ float weight_of(const Taps &taps, int interpolation, int tap) {
    if (taps.count == 1) return 1.0f;
    if (interpolation == LINEAR) return tap == 0 ? 1.0f - taps.begin : taps.begin;
    if (interpolation == CUBIC) return cubic(fabsf(taps.begin + 1.0f - tap));
    const float low = fmaxf(taps.begin, (float)(taps.first + tap)), high = fminf(taps.end, (float)(taps.first + tap + 1));
    return fmaxf(high - low, 0.0f) / (taps.end - taps.begin);
}

extern "C" __global__ void place(
    const Job *jobs, unsigned int samples, unsigned int height, unsigned int width, unsigned char *crops) {
    const unsigned int plane = height * width;
    EACH_INDEX(i, samples * plane) {
        const unsigned int sample = i / plane, in_plane = i - sample * plane, y = in_plane / width;
        const Job job = jobs[sample];
        if (job.pixels == 0) continue;
        const unsigned char *pixels = reinterpret_cast<const unsigned char *>(job.pixels);
        const int interpolation = (int)job.interpolation, high = (int)job.height, wide = (int)job.width;
        const Taps down = taps_of(interpolation, (int)job.top + (int)y, (int)job.rows, high);
        const Taps across = taps_of(interpolation, (int)job.left + (int)(in_plane - y * width), (int)job.columns, wide);
        float sums[3] = {0.0f, 0.0f, 0.0f};
        for (int v = 0; v < down.count; ++v) {
            const float row_weight = weight_of(down, interpolation, v);
            const unsigned char *row = pixels + min(max(down.first + v, 0), high - 1) * job.row_stride;
            for (int u = 0; u < across.count; ++u) {
                const float weight = row_weight * weight_of(across, interpolation, u);
                const unsigned char *pixel = row + min(max(across.first + u, 0), wide - 1) * job.column_stride;
                for (int c = 0; c < 3; ++c) sums[c] += weight * pixel[c * job.channel_stride];
            }
        }
        for (int c = 0; c < 3; ++c) {
            const int value = min(max(__float2int_rn(sums[2 - c]), 0), 255);
            crops[((size_t)sample * 3 + c) * plane + in_plane] = (unsigned char)value;
        }
    }
}

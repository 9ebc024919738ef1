// Batches that came through a ring of slots, as bytes of images or as floats, become blobs.

// Where the slot of the present pass begins. `counter`, if any, holds the pass's number; there are 2^k slots, and `last`
// is the last one's number.
__device__ __forceinline__ const unsigned char *slot_of(
    const unsigned char *ring, const unsigned long long *counter, unsigned long long number, unsigned int last,
    unsigned long long slot_size) {
    const unsigned long long pass = counter != nullptr ? counter[0] : number;
    return ring + ((unsigned int)pass & last) * slot_size;
}

// Where an image lies in its whole: as ImageSlot in backend/types.py.
struct Place {
    int mirrored, top, left;
};

// The shape of a batch of images, and the width of the mean.
struct Images {
    unsigned int channels, width, plane, mean_width;
    Divider by_plane, by_width;
};

// Where the first channel of pixel number `pixel` (of the whole batch, as it lies in the blob) comes from, and its mean.
struct Source {
    unsigned int pixel, mean;
};

template <bool WHOLE>
__device__ __forceinline__ Source source_of(const Images &batch, const Place *places, unsigned int pixel) {
    const unsigned int sample = batch.by_plane(pixel);
    unsigned int in_plane = pixel - sample * batch.plane;
    const bool mirrored = places[sample].mirrored;
    Source source = {0, 0};
    if (mirrored || WHOLE) {
        const unsigned int y = batch.by_width(in_plane);
        const unsigned int x = in_plane - y * batch.width;
        const unsigned int column = mirrored ? batch.width - 1 - x : x;
        in_plane += column - x;
        if (WHOLE) source.mean = (places[sample].top + y) * batch.mean_width + places[sample].left + column;
    }
    source.pixel = sample * batch.channels * batch.plane + in_plane;
    return source;
}

// Labels from floats; images, channels last, from planes of bytes. A block makes PIXELS times its threads' pixels at a
// time in shared memory, so that neighbouring threads read neighbouring bytes and write neighbouring words. All bytes of
// a thread are asked for before the first is used: memory is far. With a TILE of 0 threads write where they are, for
// blobs that lie anywhere and pixels too large for that. CHANNELS is their number, or 0 where only the launch knows it.
// The mean has one number for each channel or, WHOLE_MEAN, one for each pixel of a whole image.
extern "C" __global__ void images(
    const unsigned char *ring, const unsigned long long *counter, unsigned long long number, unsigned int last,
    unsigned long long slot_size, unsigned long long places_at, unsigned long long pixels_at, unsigned int samples,
    unsigned int channels, unsigned int width, unsigned int plane, unsigned int mean_width, unsigned int mean_plane,
    Divider by_plane, Divider by_width, float scale, const float *mean, ELEMENT *images, float *labels) {
    __shared__ alignas(16) ELEMENT tile[TILE ? TILE : 1];
    const Images batch = {channels, width, plane, mean_width, by_plane, by_width};
    const unsigned char *slot = slot_of(ring, counter, number, last, slot_size), *pixels = slot + pixels_at;
    const Place *places = reinterpret_cast<const Place *>(slot + places_at);
    constexpr int TOGETHER = CHANNELS ? CHANNELS : 1;
    const unsigned int depth = CHANNELS ? CHANNELS : channels;
    const unsigned int total = samples * plane, size = PIXELS * blockDim.x;
    for (unsigned int first = blockIdx.x * size; first < total; first += gridDim.x * size) {
        Source sources[PIXELS];
#pragma unroll
        for (int k = 0; k < PIXELS; ++k) {
            const unsigned int pixel = first + k * blockDim.x + threadIdx.x;
            sources[k] = source_of<WHOLE_MEAN>(batch, places, min(pixel, total - 1));
        }
        for (unsigned int c = 0; c < depth; c += TOGETHER) {
            unsigned char bytes[PIXELS][TOGETHER];
            float means[PIXELS][TOGETHER];
#pragma unroll
            for (int i = 0; i < PIXELS * TOGETHER; ++i) {
                const int k = i / TOGETHER, d = i % TOGETHER;
                bytes[k][d] = pixels[sources[k].pixel + (c + d) * plane];
                means[k][d] = mean[WHOLE_MEAN ? (c + d) * mean_plane + sources[k].mean : c + d];
            }
#pragma unroll
            for (int i = 0; i < PIXELS * TOGETHER; ++i) {
                const int k = i / TOGETHER, d = i % TOGETHER;
                const unsigned int at = k * blockDim.x + threadIdx.x;
                if (first + at >= total) break;
                const Pack<float, 1> value = {{((float)bytes[k][d] - means[k][d]) * scale}};
                if (TILE) {
                    store<1>(tile, at * depth + c + d, value);
                } else {
                    store<1>(images, (size_t)(first + at) * depth + c + d, value);
                }
            }
        }
        if (TILE) {
            // The tile is whole only when all threads have put their pixels.
            __syncthreads();
            const unsigned int count = min(size, total - first) * depth;
            const unsigned int words = count * sizeof(ELEMENT) / 16;
            ELEMENT *to = images + (size_t)first * depth;
            for (unsigned int i = threadIdx.x; i < words; i += blockDim.x) {
                reinterpret_cast<uint4 *>(to)[i] = reinterpret_cast<const uint4 *>(tile)[i];
            }
            for (unsigned int i = words * 16 / sizeof(ELEMENT) + threadIdx.x; i < count; i += blockDim.x) to[i] = tile[i];
            // The next pixels take the same tile.
            __syncthreads();
        }
    }
    if (labels != nullptr) {
        EACH_INDEX(i, samples) labels[i] = reinterpret_cast<const float *>(slot)[i];
    }
}

extern "C" __global__ void values(
    const unsigned char *ring, const unsigned long long *counter, unsigned long long number, unsigned int last,
    unsigned long long slot_size, unsigned long long offset, unsigned int count, ELEMENT *values) {
    const float *found = reinterpret_cast<const float *>(slot_of(ring, counter, number, last, slot_size) + offset);
    EACH_INDEX(i, count / WIDTH) store<WIDTH>(values, i, load<WIDTH>(found, i));
    EACH_INDEX(i, count % WIDTH) {
        const unsigned int at = count / WIDTH * WIDTH + i;
        store<1>(values, at, load<1>(found, at));
    }
}

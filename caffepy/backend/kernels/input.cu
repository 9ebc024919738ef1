// Batches that came through a ring of slots, as bytes of images or as floats, become blobs.

// Where the slot of the present pass begins. `counter`, if any, holds the pass's number; there are 2^k slots, and `last`
// is the last one's number.
__device__ __forceinline__ const unsigned char *slot_of(
    const unsigned char *ring, const unsigned long long *counter, unsigned long long number, unsigned int last,
    unsigned long long slot_size) {
    const unsigned long long pass = counter != nullptr ? counter[0] : number;
    return ring + ((unsigned int)pass & last) * slot_size;
}

// Where an image lies in its whole: as ImageSlot in input.py.
struct Place {
    int mirrored, top, left;
};

// images, `count` elements, channels last, from planes of bytes; labels from floats. WHOLE: the mean has one number for
// each pixel of a whole image, in planes, otherwise one for each channel.
template <typename T, int V, bool WHOLE>
__device__ void take_images(
    const unsigned char *slot, unsigned long long places_at, unsigned long long pixels_at, unsigned int count,
    unsigned int samples, unsigned int channels, unsigned int height, unsigned int width, Divider by_channels,
    Divider by_height, Divider by_width, const float *mean, unsigned int mean_height, unsigned int mean_width,
    float scale, T *images, float *labels) {
    const Place *places = reinterpret_cast<const Place *>(slot + places_at);
    const unsigned char *pixels = slot + pixels_at;
    const unsigned int plane = height * width, mean_plane = mean_height * mean_width;
    EACH_INDEX(i, (count + V - 1) / V) {
        const unsigned int pixel = by_channels(i * V);
        unsigned int c = i * V - pixel * channels;
        unsigned int row = by_width(pixel);
        unsigned int x = pixel - row * width;
        unsigned int sample = by_height(row);
        unsigned int y = row - sample * height;
        Place place = places[sample];
        Pack<float, V> values;
#pragma unroll
        for (int k = 0; k < V; ++k) {
            if (V > 1 && i * V + k >= count) break;
            const unsigned int column = place.mirrored ? width - 1 - x : x;
            const float value = pixels[(size_t)(sample * channels + c) * plane + y * width + column];
            const float less =
                WHOLE ? mean[c * mean_plane + (place.top + y) * mean_width + place.left + column] : mean[c];
            values[k] = (value - less) * scale;
            if (++c == channels) {
                c = 0;
                if (++x == width) {
                    x = 0;
                    if (++y == height) {
                        y = 0;
                        if (++sample < samples) place = places[sample];
                    }
                }
            }
        }
        if (V == 1 || (i + 1) * V <= count) {
            store<V>(images, i, values);
        } else {
#pragma unroll
            for (int k = 0; k < V; ++k) {
                if (i * V + k < count) store<1>(images, i * V + k, Pack<float, 1>{{values[k]}});
            }
        }
    }
    if (labels != nullptr) {
        EACH_INDEX(i, samples) labels[i] = reinterpret_cast<const float *>(slot)[i];
    }
}

extern "C" __global__ void images(
    const unsigned char *ring, const unsigned long long *counter, unsigned long long number, unsigned int last,
    unsigned long long slot_size, unsigned long long places_at, unsigned long long pixels_at, unsigned int count,
    unsigned int samples, unsigned int channels, unsigned int height, unsigned int width, Divider by_channels,
    Divider by_height, Divider by_width, const float *mean, unsigned int mean_height, unsigned int mean_width,
    float scale, ELEMENT *images, float *labels) {
    take_images<ELEMENT, WIDTH, WHOLE_MEAN>(
        slot_of(ring, counter, number, last, slot_size), places_at, pixels_at, count, samples, channels, height, width,
        by_channels, by_height, by_width, mean, mean_height, mean_width, scale, images, labels);
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

// Each channel of a channels-last array several times, one beside the other, and back. The text before this file defines the type
// Element and PACK, the elements of a thread.

// out (pixels, times * channels) = each channel of x (pixels, channels) `times` times; count: packs of out.
extern "C" __global__ void repeat_channels(const Element *x, Element *out, Divider by_times, unsigned int count) {
    EACH_INDEX(i, count) {
        Pack<Element, PACK> pack;
#pragma unroll
        for (int v = 0; v < PACK; ++v) pack[v] = x[by_times(i * PACK + v)];
        store_raw<PACK>(out, i, pack);
    }
}

// x (pixels, channels) = the sum of each `times` neighbours of (pixels, times * channels), in float32.
extern "C" __global__ void add_channels(const float *repeated, float *x, unsigned int times, unsigned int count) {
    EACH_INDEX(i, count) {
        float sum = repeated[(size_t)i * times];
        for (unsigned int k = 1; k < times; ++k) sum += repeated[(size_t)i * times + k];
        x[i] = sum;
    }
}

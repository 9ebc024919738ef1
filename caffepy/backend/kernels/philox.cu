// Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11): random numbers that are a function of
// a counter. The counter is (element / 4, sample low, sample high, pass number).

__device__ __forceinline__ uint4 philox(uint4 counter, uint2 key) {
    for (int round = 0; round < 10; ++round) {
        const unsigned int high0 = __umulhi(0xD2511F53u, counter.x), low0 = 0xD2511F53u * counter.x;
        const unsigned int high1 = __umulhi(0xCD9E8D57u, counter.z), low1 = 0xCD9E8D57u * counter.z;
        counter = make_uint4(high1 ^ counter.y ^ key.x, low1, high0 ^ counter.w ^ key.y, low0);
        key.x += 0x9E3779B9u;
        key.y += 0xBB67AE85u;
    }
    return counter;
}

__device__ __forceinline__ float unit(unsigned int word) { return (word >> 8) * 5.9604644775390625e-8f; }

// out is (samples, elements) in C order; one thread four elements of one sample.
extern "C" __global__ void uniform(float *out, unsigned int elements, unsigned int key0, unsigned int key1,
                                   unsigned int pass, unsigned long long first_sample, unsigned int count) {
    const unsigned int quads = (elements + 3) / 4;
    EACH_INDEX(i, count) {
        const unsigned int quad = i % quads, row = i / quads;
        const unsigned long long sample = first_sample + row;
        const uint4 word = philox(make_uint4(quad, (unsigned int)sample, (unsigned int)(sample >> 32), pass),
                                  make_uint2(key0, key1));
        const float values[4] = {unit(word.x), unit(word.y), unit(word.z), unit(word.w)};
        for (unsigned int k = 0; k < 4 && 4 * quad + k < elements; ++k)
            out[(size_t)row * elements + 4 * quad + k] = values[k];
    }
}

// out is (samples, places, channels) in memory, numbered as (samples, channels, places); one thread an element.
extern "C" __global__ void uniform_channels_last(float *out, unsigned int places, unsigned int channels,
                                                 unsigned int key0, unsigned int key1, unsigned int pass,
                                                 unsigned long long first_sample, unsigned int count) {
    EACH_INDEX(i, count) {
        const unsigned int c = i % channels, place = i / channels % places;
        const unsigned long long sample = first_sample + i / channels / places;
        const unsigned int element = c * places + place;
        const uint4 word = philox(make_uint4(element / 4, (unsigned int)sample, (unsigned int)(sample >> 32), pass),
                                  make_uint2(key0, key1));
        const unsigned int pair = element & 2 ? (element & 1 ? word.w : word.z) : (element & 1 ? word.y : word.x);
        out[i] = unit(pair);
    }
}

// The same where places is a multiple of 4: one thread four places of one channel, so that each is computed once.
extern "C" __global__ void uniform_quads(float *out, unsigned int places, unsigned int channels, unsigned int key0,
                                         unsigned int key1, unsigned int pass, unsigned long long first_sample,
                                         unsigned int count) {
    const unsigned int quads = places / 4;
    EACH_INDEX(i, count) {
        const unsigned int c = i % channels, quad = i / channels % quads, row = i / channels / quads;
        const unsigned long long sample = first_sample + row;
        const uint4 word = philox(
            make_uint4(c * quads + quad, (unsigned int)sample, (unsigned int)(sample >> 32), pass), make_uint2(key0, key1));
        float *first = out + ((size_t)row * places + 4 * quad) * channels + c;
        first[0] = unit(word.x);
        first[channels] = unit(word.y);
        first[2 * (size_t)channels] = unit(word.z);
        first[3 * (size_t)channels] = unit(word.w);
    }
}

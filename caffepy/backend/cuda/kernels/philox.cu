// Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC11): random numbers that are a function of
// a counter. The counter is (element / 4, sample low, sample high, pass number). The text before defines STORED (the type of
// `out`) and, for dropout, SOURCE; and QUADS, whether four neighbours can be written at once.

__device__ __forceinline__ uint4 philox(uint4 counter, uint2 key) {
#pragma unroll
    for (int round = 0; round < 10; ++round) {
        const unsigned int high0 = __umulhi(0xD2511F53u, counter.x), low0 = 0xD2511F53u * counter.x;
        const unsigned int high1 = __umulhi(0xCD9E8D57u, counter.z), low1 = 0xCD9E8D57u * counter.z;
        counter = make_uint4(high1 ^ counter.y ^ key.x, low1, high0 ^ counter.w ^ key.y, low0);
        key.x += 0x9E3779B9u;
        key.y += 0xBB67AE85u;
    }
    return counter;
}

// 24 bits, which a float32 holds exactly: rounding 32 bits could give 1.
__device__ __forceinline__ float unit(unsigned int word) { return (word >> 8) * 5.9604644775390625e-8f; }

// Where in the sequence a kernel begins; `counter`, if there is one, holds pass number and first sample.
struct Sequence {
    uint2 key;
    unsigned int pass;
    unsigned long long first_sample;

    __device__ __forceinline__ Pack<float, 4> quad(unsigned int number, unsigned int row) const {
        const unsigned long long sample = first_sample + row;
        const uint4 word = philox(make_uint4(number, (unsigned int)sample, (unsigned int)(sample >> 32), pass), key);
        return {unit(word.x), unit(word.y), unit(word.z), unit(word.w)};
    }
};

#define SEQUENCE unsigned int key0, unsigned int key1, unsigned int pass, unsigned long long first_sample, \
    const unsigned long long *counter
#define MAKE_SEQUENCE                                               \
    Sequence sequence = {make_uint2(key0, key1), pass, first_sample}; \
    if (counter) sequence.pass = (unsigned int)counter[0], sequence.first_sample = counter[1];

// What is written given the random numbers of V neighbours, the first of which is element i: the numbers, or the source where
// they are at least `ratio`.
#ifdef SOURCE
#define TARGET const SOURCE *source, STORED *out, float ratio, float scale
#define PASS_TARGET source, out, ratio, scale
#else
#define TARGET STORED *out
#define PASS_TARGET out
#endif

template <int V>
__device__ __forceinline__ void put(TARGET, size_t i, Pack<float, V> chances) {
#ifdef SOURCE
    const Pack<float, V> x = load<V>(source + i, 0);
#pragma unroll
    for (int k = 0; k < V; ++k) chances[k] = chances[k] >= ratio ? x[k] * scale : 0.0f;
#endif
    store<V>(out + i, 0, chances);
}

// Arrays of (samples, elements) in C order; one thread four elements of one sample.
extern "C" __global__ void fill_rows(TARGET, unsigned int elements, unsigned int quads, Divider by_quads, SEQUENCE,
                                     unsigned int count) {
    MAKE_SEQUENCE
    EACH_INDEX(i, count) {
        const unsigned int row = by_quads(i), number = i - row * quads;
        const Pack<float, 4> chances = sequence.quad(number, row);
        const size_t first = (size_t)row * elements + 4 * number;
#if QUADS
        put<4>(PASS_TARGET, first, chances);
#else
        for (unsigned int k = 0; k < 4 && 4 * number + k < elements; ++k) put<1>(PASS_TARGET, first + k, {chances[k]});
#endif
    }
}

// Arrays of (samples, pixels, channels) in memory, numbered as (samples, channels, pixels). One thread four pixels of one
// channel; their numbers are those of one quad, or of two where pixels is no multiple of 4.
extern "C" __global__ void fill_planes(TARGET, unsigned int channels, Divider by_channels, unsigned int places,
                                       unsigned int groups, Divider by_groups, SEQUENCE, unsigned int count) {
    MAKE_SEQUENCE
    EACH_INDEX(i, count) {
        const unsigned int over = by_channels(i), c = i - over * channels, row = by_groups(over);
        const unsigned int place = 4 * (over - row * groups);
        // Numbered as arrays of Caffe's order are, so that a sample's numbers do not depend on how the device stores
        // it.
        const unsigned int element = c * places + place;
        Pack<float, 4> chances = sequence.quad(element / 4, row);
        if (element % 4 != 0) {
            const Pack<float, 4> next = sequence.quad(element / 4 + 1, row);
            const float all[8] = {chances[0], chances[1], chances[2], chances[3], next[0], next[1], next[2], next[3]};
            float half[6];
#pragma unroll
            for (int k = 0; k < 6; ++k) half[k] = element & 2 ? all[k + 2] : all[k];
#pragma unroll
            for (int k = 0; k < 4; ++k) chances[k] = element & 1 ? half[k + 1] : half[k];
        }
        const size_t first = ((size_t)row * places + place) * channels + c;
#pragma unroll
        for (int k = 0; k < 4; ++k)
            if (place + k < places) put<1>(PASS_TARGET, first + k * (size_t)channels, {chances[k]});
    }
}

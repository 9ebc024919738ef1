// What trying candidates needs beside them. The text before this file defines the type Element where it is wanted.

#ifndef Element
#define Element float
#endif

// Keeps the stream busy for so many nanoseconds.
extern "C" __global__ void idle(unsigned int nanoseconds) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - start < nanoseconds);
}

// Numbers from -1 to 1 without any pattern that arithmetic would notice.
extern "C" __global__ void noise(Element *out, unsigned int count) {
    EACH_INDEX(i, count) {
        unsigned int bits = i * 2654435761u;
        bits = (bits ^ bits >> 15) * 2246822519u;
        out[i] = Rounded<Element>::one((float)(int)(bits ^ bits >> 13) * (1.0f / 2147483648.0f));
    }
}

// bits = the greatest of what was in it and of all values, none of them negative; NaN counts as infinity. As whole numbers
// floats from 0 on have the same order.
__device__ __forceinline__ void keep_greatest(float value, unsigned int *bits) {
    value = value != value ? __uint_as_float(0x7f800000u) : value;
    value = warp_max(value);
    // A maximum does not depend on the order of the warps.
    if (threadIdx.x % 32 == 0) atomicMax(bits, __float_as_uint(value));
}

extern "C" __global__ void largest(const Element *values, const Element *, unsigned int *bits, unsigned int count) {
    float own = 0.0f;
    EACH_INDEX(i, count) {
        const float value = fabsf(to_float(values[i]));
        own = value <= own || own != own ? own : value;
    }
    keep_greatest(own, bits);
}

extern "C" __global__ void difference(const Element *values, const Element *expected, unsigned int *bits, unsigned int count) {
    float own = 0.0f;
    EACH_INDEX(i, count) {
        const float value = fabsf(to_float(values[i]) - to_float(expected[i]));
        own = value <= own || own != own ? own : value;
    }
    keep_greatest(own, bits);
}

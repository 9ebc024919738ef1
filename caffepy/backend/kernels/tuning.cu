// What trying candidates needs beside them.

// Keeps the stream busy for so many nanoseconds.
extern "C" __global__ void idle(unsigned int nanoseconds) {
    unsigned long long start, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
    do {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (now - start < nanoseconds);
}

// Numbers from -1 to 1 without any pattern that arithmetic would notice.
template <typename T>
__device__ __forceinline__ void fill(T *out, unsigned int count) {
    EACH_INDEX(i, count) {
        unsigned int bits = i * 2654435761u;
        bits = (bits ^ bits >> 15) * 2246822519u;
        out[i] = Rounded<T>::one((float)(int)(bits ^ bits >> 13) * (1.0f / 2147483648.0f));
    }
}

extern "C" __global__ void noise_float(float *out, unsigned int count) { fill(out, count); }
extern "C" __global__ void noise_float16(float16 *out, unsigned int count) { fill(out, count); }
extern "C" __global__ void noise_bfloat16(bfloat16 *out, unsigned int count) { fill(out, count); }

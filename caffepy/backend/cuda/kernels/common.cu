// Put before every other kernel file: loops over elements, sums over threads, and how elements are stored.

#define EACH_INDEX(i, n) \
    for (unsigned int i = blockIdx.x * blockDim.x + threadIdx.x; i < (n); i += gridDim.x * blockDim.x)

// The larger and the smaller of two numbers, NaN where one of them is NaN: C's fmaxf and fminf would hide it.
__device__ __forceinline__ float larger_of(float a, float b) {
#if __CUDA_ARCH__ >= 800
    float result;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
#else
    return a > b || a != a ? a : b;
#endif
}

__device__ __forceinline__ float smaller_of(float a, float b) {
#if __CUDA_ARCH__ >= 800
    float result;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
#else
    return a < b || a != a ? a : b;
#endif
}

// Whether a value replaces the best so far: the first maximum does, and the first NaN, which passes on.
__device__ __forceinline__ bool wins(float value, float best) { return !(value <= best) && best == best; }

template <typename T>
__device__ __forceinline__ T warp_sum(T value) {
    // Exchanged by xor, every lane adds up the same tree: all have the same bits.
    for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(0xffffffffu, value, offset);
    return value;
}

__device__ __forceinline__ float warp_max(float value) {
    for (int offset = 16; offset > 0; offset /= 2) value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, offset));
    return value;
}

// The sum over a block of at most 1024 threads, a multiple of 32; all threads must call it. Only thread 0's result counts.
__device__ __forceinline__ double block_sum(double value) {
    __shared__ double shared[32];
    value = warp_sum(value);
    // The block may have called this before: its slower threads still read the memory.
    __syncthreads();
    if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = value;
    __syncthreads();
    value = threadIdx.x < blockDim.x / 32 ? shared[threadIdx.x] : 0.0;
    return threadIdx.x < 32 ? warp_sum(value) : 0.0;
}

// -- division --------------------------------------------------------------------------------------------------------------

// Quotients by a number known at the launch; exact for n < 2^31. Its 8 bytes are cuda/compiler.py's `divider`.
struct Divider {
    unsigned int factor, shift;
    __device__ __forceinline__ unsigned int operator()(unsigned int n) const {
        return (unsigned int)(((unsigned long long)n * factor) >> shift);
    }
};

// -- dtypes ----------------------------------------------------------------------------------------------------------------

struct float16 {
    unsigned short bits;
};

struct bfloat16 {
    unsigned short bits;
};

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(int x) { return (float)x; }
__device__ __forceinline__ float to_float(unsigned char x) { return (float)x; }
__device__ __forceinline__ float to_float(bfloat16 x) { return __uint_as_float((unsigned int)x.bits << 16); }
__device__ __forceinline__ float to_float(float16 x) {
    float result;
    asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(x.bits));
    return result;
}

// How a float is rounded to T, to the nearest even; `pair` gives two neighbours as one word.
template <typename T>
struct Rounded;

template <>
struct Rounded<float> {
    static __device__ __forceinline__ float one(float x) { return x; }
};

template <>
struct Rounded<float16> {
    static __device__ __forceinline__ float16 one(float x) {
        float16 result;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(result.bits) : "f"(x));
        return result;
    }
    static __device__ __forceinline__ unsigned int pair(float low, float high) {
#if __CUDA_ARCH__ >= 800
        unsigned int result;
        // PTX puts the first number into the upper half.
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
        return result;
#else
        return one(low).bits | (unsigned int)one(high).bits << 16;
#endif
    }
};

template <>
struct Rounded<bfloat16> {
    static __device__ __forceinline__ bfloat16 one(float x) {
        const unsigned int bits = __float_as_uint(x), odd = bits >> 16 & 1u;
        bfloat16 result;
        // Half of the last place less one, and the last kept bit: ties go to the even neighbour. A NaN is written as
        // one, because the sum could make it infinite.
        result.bits = x != x ? 0x7fffu : (unsigned short)((bits + 0x7fffu + odd) >> 16);
        return result;
    }
    static __device__ __forceinline__ unsigned int pair(float low, float high) {
#if __CUDA_ARCH__ >= 800
        unsigned int result;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
        return result;
#else
        return one(low).bits | (unsigned int)one(high).bits << 16;
#endif
    }
};

// V neighbouring elements in registers; V is a power of two.
template <typename T, int V>
struct Pack {
    T v[V];
    __device__ __forceinline__ T &operator[](int i) { return v[i]; }
    __device__ __forceinline__ const T &operator[](int i) const { return v[i]; }
};

template <int BYTES>
struct Word;
template <>
struct Word<1> { typedef unsigned char type; };
template <>
struct Word<2> { typedef unsigned short type; };
template <>
struct Word<4> { typedef unsigned int type; };
template <>
struct Word<8> { typedef uint2 type; };
template <>
struct Word<16> { typedef uint4 type; };

// Copies BYTES in words of up to 16 bytes; both ends are aligned to such a word.
template <int BYTES>
__device__ __forceinline__ void move_bytes(void *to, const void *from) {
    typedef typename Word<(BYTES < 16 ? BYTES : 16)>::type W;
#pragma unroll
    for (int k = 0; k < BYTES / (int)sizeof(W); ++k) reinterpret_cast<W *>(to)[k] = reinterpret_cast<const W *>(from)[k];
}

// Pack number i of an array as it is stored.
template <int V, typename T>
__device__ __forceinline__ Pack<T, V> load_raw(const T *from, size_t i) {
    alignas(16) Pack<T, V> pack;
    move_bytes<(int)sizeof(T) * V>(&pack, from + i * V);
    return pack;
}

template <int V, typename T>
__device__ __forceinline__ void store_raw(T *to, size_t i, Pack<T, V> pack) {
    alignas(16) Pack<T, V> aligned = pack;
    move_bytes<(int)sizeof(T) * V>(to + i * V, &aligned);
}

// N neighbouring elements as words, which become floats one at a time: packs of 16-bit elements would take a register an element
// from the load on.
template <typename T, int N>
struct Words {
    static constexpr int EACH = sizeof(T) == 4 || N == 1 ? 1 : 2;
    typedef typename Word<EACH * sizeof(T)>::type One;
    Pack<One, N / EACH> words;

    __device__ __forceinline__ void load(const T *from) { words = load_raw<N / EACH>(reinterpret_cast<const One *>(from), 0); }

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int k = 0; k < N / EACH; ++k) words[k] = 0;
    }

    __device__ __forceinline__ float operator[](int j) const {
        if constexpr (sizeof(T) == 4) {
            return __uint_as_float(words[j]);
        } else {
            return to_float(T{(unsigned short)(words[j / EACH] >> j % EACH * 16)});
        }
    }
};

// Pack number i of an array as floats.
template <int V, typename T>
__device__ __forceinline__ Pack<float, V> load(const T *from, size_t i) {
    const Pack<T, V> raw = load_raw<V>(from, i);
    Pack<float, V> result;
#pragma unroll
    for (int k = 0; k < V; ++k) result[k] = to_float(raw[k]);
    return result;
}

template <int V>
__device__ __forceinline__ void store(float *to, size_t i, Pack<float, V> values) { store_raw(to, i, values); }

template <int V, typename T>
__device__ __forceinline__ void store(T *to, size_t i, Pack<float, V> values) {
    if constexpr (V == 1) {
        to[i] = Rounded<T>::one(values[0]);
    } else {
        alignas(16) Pack<unsigned int, V / 2> words;
#pragma unroll
        for (int k = 0; k < V / 2; ++k) words[k] = Rounded<T>::pair(values[2 * k], values[2 * k + 1]);
        move_bytes<(int)sizeof(T) * V>(to + i * V, &words);
    }
}

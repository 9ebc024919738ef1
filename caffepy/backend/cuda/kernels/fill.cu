// Sets n elements to one pattern of bits. The text before defines Element, an unsigned type of their size.

extern "C" __global__ void fill(Element *x, Element value, unsigned long long n) {
    const unsigned long long step = (unsigned long long)gridDim.x * blockDim.x;
    for (unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += step) x[i] = value;
}

// Products on tensor cores with TF32 factors, which need compute capability 8.0; put before the kernels that use them.

// A number rounded to ten bits behind the point.
__device__ __forceinline__ unsigned int tf32(float x) {
    unsigned int result;
    // Unrounded, the tensor cores would ignore the other bits: all factors would be rounded towards zero.
    asm("cvt.rna.tf32.f32 %0, %1;" : "=r"(result) : "f"(x));
    return result;
}

// sum += a * b for a tile of 16 x 8, 8 deep, which a warp shares as PTX's mma.m16n8k8 says.
__device__ __forceinline__ void multiply_add(float (&sum)[4], const unsigned int (&a)[4], const unsigned int (&b)[2]) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
        : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}


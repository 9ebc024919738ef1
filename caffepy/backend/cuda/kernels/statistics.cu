// What batch normalisation keeps of a batch: mean and deviation of each channel and the running sums.

struct Statistics {
    float *mean, *inverse, *sum_mean, *sum_variance, *count;
    float epsilon, fraction;
};

// Takes in a channel with m elements.
__device__ __forceinline__ void keep(const Statistics &s, unsigned int c, double mean, double variance, unsigned int m,
                                     float old_mean, float old_variance) {
    variance = variance < 0.0 ? 0.0 : variance;  // NaN stays
    s.mean[c] = (float)mean;
    s.inverse[c] = (float)rsqrt(variance + s.epsilon);
    s.sum_mean[c] = s.fraction * old_mean + (float)mean;
    // Caffe keeps the variance of a sample, while the batch is normalised by that of the batch.
    s.sum_variance[c] = s.fraction * old_variance + (float)variance * (m > 1 ? (float)m / (m - 1) : 1.0f);
}

// Takes in the batch; for one thread.
__device__ __forceinline__ void keep_count(const Statistics &s) {
    *s.count = s.fraction * *s.count + 1.0f;
}

// From the sums of x and of x^2.
extern "C" __global__ void measure_sums(const float *sums, float *mean, float *inverse, float *sum_mean,
                                        float *sum_variance, float *count, float epsilon, float fraction,
                                        unsigned int elements, unsigned int columns) {
    const Statistics statistics = {mean, inverse, sum_mean, sum_variance, count, epsilon, fraction};
    const double share = 1.0 / max(elements, 1u);
    EACH_INDEX(c, columns) {
        // In double: where the mean is large, the two numbers that are subtracted are nearly equal.
        const double first = sums[c] * share, second = sums[columns + c] * share;
        keep(statistics, c, first, second - first * first, elements, sum_mean[c], sum_variance[c]);
    }
    if (blockIdx.x == 0 && threadIdx.x == 0) keep_count(statistics);
}

// From the running sums.
extern "C" __global__ void load_statistics(const float *sum_mean, const float *sum_variance, const float *count,
                                           float *mean, float *inverse, float epsilon, unsigned int columns) {
    const float share = *count == 0.0f ? 0.0f : 1.0f / *count;
    EACH_INDEX(c, columns) {
        mean[c] = sum_mean[c] * share;
        inverse[c] = 1.0f / sqrtf(sum_variance[c] * share + epsilon);
    }
}

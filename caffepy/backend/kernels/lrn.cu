// Local response normalisation across the channels of channels-last arrays (Krizhevsky et al., NIPS 2012).
// A window of `size` channels begins (size - 1) / 2 channels before its middle. One thread an element.

extern "C" __global__ void lrn_scale(const float *x, float *y, float *scale, int channels, int size, float alpha,
                                     float beta, float k, unsigned int count) {
    const int before = (size - 1) / 2, after = size - 1 - before;
    EACH_INDEX(i, count) {
        const int c = i % channels;
        const float *row = x + (i - c);
        float sum = 0.0f;
        for (int j = max(c - before, 0); j <= min(c + after, channels - 1); ++j) sum += row[j] * row[j];
        const float s = k + alpha / size * sum;
        scale[i] = s;
        y[i] = row[c] * powf(s, -beta);
    }
}

extern "C" __global__ void lrn_gradient(const float *x, const float *y, const float *scale, const float *dy, float *dx,
                                        int channels, int size, float alpha, float beta, unsigned int count) {
    const int before = (size - 1) / 2, after = size - 1 - before;
    EACH_INDEX(i, count) {
        const int c = i % channels;
        const unsigned int row = i - c;
        float sum = 0.0f;
        for (int j = max(c - after, 0); j <= min(c + before, channels - 1); ++j)
            sum += dy[row + j] * y[row + j] / scale[row + j];
        dx[i] = dy[i] * powf(scale[i], -beta) - 2.0f * alpha * beta / size * x[i] * sum;
    }
}

// Softmax, its loss and the rank of a label. An array is (outer, classes, inner) in memory; a place is one of outer * inner.
// Two forms: `_rows` for inner == 1, one warp a place, so that neighbours load neighbours; `_columns` one thread a place.

struct Line {
    size_t start;
    int step, from, stride, classes;
};

// The classes of one place, dealt out to the lanes of a warp.
__device__ __forceinline__ Line row_line(unsigned int place, int classes) {
    return {(size_t)place * classes, 32, (int)(threadIdx.x % 32), 1, classes};
}

// The classes of one place, all for one thread.
__device__ __forceinline__ Line column_line(unsigned int place, int classes, int inner) {
    return {(size_t)(place / inner) * classes * inner + place % inner, 1, 0, inner, classes};
}

template <bool WARP>
__device__ __forceinline__ float total(float value) {
    return WARP ? warp_sum(value) : value;
}

template <bool WARP>
__device__ void softmax(const float *x, float *y, Line l) {
    float top = -3.402823466e+38f, sum = 0.0f;
    for (int c = l.from; c < l.classes; c += l.step) top = fmaxf(top, x[l.start + (size_t)c * l.stride]);
    if (WARP) top = warp_max(top);
    for (int c = l.from; c < l.classes; c += l.step) {
        const float e = expf(x[l.start + (size_t)c * l.stride] - top);
        y[l.start + (size_t)c * l.stride] = e;
        sum += e;
    }
    sum = total<WARP>(sum);
    for (int c = l.from; c < l.classes; c += l.step) y[l.start + (size_t)c * l.stride] /= sum;
}

template <bool WARP>
__device__ void softmax_gradient(const float *y, const float *dy, float *dx, Line l) {
    float dot = 0.0f;
    for (int c = l.from; c < l.classes; c += l.step) {
        const size_t i = l.start + (size_t)c * l.stride;
        dot += y[i] * dy[i];
    }
    dot = total<WARP>(dot);
    for (int c = l.from; c < l.classes; c += l.step) {
        const size_t i = l.start + (size_t)c * l.stride;
        dx[i] = y[i] * (dy[i] - dot);
    }
}

// The class that a label means, or -1 where it is outside the classes.
__device__ __forceinline__ int class_of(float label, int classes) {
    return label > -1.0f && label < (float)classes ? (int)label : -1;
}

template <bool WARP>
__device__ void rank(const float *x, const float *labels, float *ranks, int *bad_label, unsigned int place, Line l) {
    const int label = class_of(labels[place], l.classes);
    float better = 0.0f;
    if (label >= 0) {
        const float own = x[l.start + (size_t)label * l.stride];
        for (int c = l.from; c < l.classes; c += l.step)
            better += c != label && x[l.start + (size_t)c * l.stride] >= own ? 1.0f : 0.0f;
        better = total<WARP>(better);
    }
    if (l.from != 0) return;
    ranks[place] = label >= 0 ? better : -1.0f;
    if (label < 0) atomicMax(bad_label, (int)place);
}

#define ROWS(place) \
    for (unsigned int place = (blockIdx.x * blockDim.x + threadIdx.x) / 32; place < places; \
         place += gridDim.x * blockDim.x / 32)

extern "C" __global__ void softmax_rows(const float *x, float *y, int classes, int inner, unsigned int places) {
    ROWS(place) softmax<true>(x, y, row_line(place, classes));
}

extern "C" __global__ void softmax_columns(const float *x, float *y, int classes, int inner, unsigned int places) {
    EACH_INDEX(place, places) softmax<false>(x, y, column_line(place, classes, inner));
}

extern "C" __global__ void gradient_rows(const float *y, const float *dy, float *dx, int classes, int inner,
                                         unsigned int places) {
    ROWS(place) softmax_gradient<true>(y, dy, dx, row_line(place, classes));
}

extern "C" __global__ void gradient_columns(const float *y, const float *dy, float *dx, int classes, int inner,
                                            unsigned int places) {
    EACH_INDEX(place, places) softmax_gradient<false>(y, dy, dx, column_line(place, classes, inner));
}

extern "C" __global__ void ranks_rows(const float *x, const float *labels, float *ranks, int *bad_label, int classes,
                                      int inner, unsigned int places) {
    ROWS(place) rank<true>(x, labels, ranks, bad_label, place, row_line(place, classes));
}

extern "C" __global__ void ranks_columns(const float *x, const float *labels, float *ranks, int *bad_label, int classes,
                                         int inner, unsigned int places) {
    EACH_INDEX(place, places) rank<false>(x, labels, ranks, bad_label, place, column_line(place, classes, inner));
}

// Each block adds up the losses of its places and counts their labels: partial[0..blocks) and partial[blocks..2 blocks).
extern "C" __global__ void loss_partial(const float *probabilities, const float *labels, double *partial, int *bad_label,
                                        int classes, int inner, int has_ignored, int ignored, unsigned int places) {
    double loss = 0.0, counted = 0.0;
    EACH_INDEX(place, places) {
        const int label = class_of(labels[place], classes);
        if (has_ignored && (int)labels[place] == ignored) continue;
        if (label < 0) {
            atomicMax(bad_label, (int)place);
            continue;
        }
        const Line l = column_line(place, classes, inner);
        loss -= (double)logf(fmaxf(probabilities[l.start + (size_t)label * inner], 1.175494351e-38f));
        counted += 1.0;
    }
    loss = block_sum(loss);
    counted = block_sum(counted);
    if (threadIdx.x == 0) {
        partial[blockIdx.x] = loss;
        partial[gridDim.x + blockIdx.x] = counted;
    }
}

// totals = the sums of both halves of partial; one block.
extern "C" __global__ void loss_totals(const double *partial, int blocks, float *totals) {
    for (int k = 0; k < 2; ++k) {
        double sum = 0.0;
        for (int b = threadIdx.x; b < blocks; b += blockDim.x) sum += partial[k * blocks + b];
        sum = block_sum(sum);
        if (threadIdx.x == 0) totals[k] = (float)sum;
    }
}

// dx = (p - onehot) * scale, over max(totals[1], 1) if asked; 0 where the label is ignored or bad.
extern "C" __global__ void loss_gradient(const float *probabilities, const float *labels, float *dx, const float *totals,
                                         int classes, int inner, int has_ignored, int ignored, float scale,
                                         int divide_by_valid, unsigned int count) {
    const float factor = divide_by_valid ? scale / fmaxf(totals[1], 1.0f) : scale;
    EACH_INDEX(i, count) {
        const unsigned int line = i / inner;
        const int c = line % classes;
        const unsigned int place = line / classes * inner + i % inner;
        const int label = class_of(labels[place], classes);
        const bool skip = label < 0 || (has_ignored && (int)labels[place] == ignored);
        dx[i] = skip ? 0.0f : (probabilities[i] - (c == label ? 1.0f : 0.0f)) * factor;
    }
}

// Softmax, its loss and the rank of a label. An array is (outer, classes, inner) in memory; a position is one of the
// outer * inner. Two forms: `_rows` for inner == 1, one warp a position, so that neighbours load neighbours; `_columns`, one
// thread a position, also for small arrays of few classes, which then need but one block.
// The text before defines ITEMS: how many classes a lane of a warp keeps in registers, 0 if they are too many; and WITH_
// with the name of the kernel that is wanted. Stands on reduce.cu.

struct Line {
    size_t start;
    unsigned int step, from, stride, classes;  // a number of a class plus a step exceeds 2^31 - 1 where there are that many
};

// The classes of one position, dealt out to the lanes of a warp.
__device__ __forceinline__ Line row_line(unsigned int place, int classes) {
    return {(size_t)place * classes, 32, threadIdx.x % 32, 1, (unsigned int)classes};
}

// The classes of one position, all for one thread.
__device__ __forceinline__ Line column_line(unsigned int place, int classes, int inner) {
    return {(size_t)(place / inner) * classes * inner + place % inner, 1, 0, (unsigned int)inner, (unsigned int)classes};
}

template <bool WARP>
__device__ __forceinline__ float total(float value) {
    return WARP ? warp_sum(value) : value;
}

// What turns a number of one line into its probability, exp(x - top) / sum of that.
struct Softmax {
    float top, inverse;
    __device__ __forceinline__ float operator()(float x) const { return expf(x - top) * inverse; }
};

#define LOWEST (-3.402823466e+38f)

template <bool WARP>
__device__ __forceinline__ Softmax measure(const float *x, Line l) {
    float top = LOWEST, sum = 0.0f;
    for (unsigned int c = l.from; c < l.classes; c += l.step) top = fmaxf(top, x[l.start + (size_t)c * l.stride]);
    // A NaN is passed over here; its own exp carries it into the sum, and so into every probability.
    if (WARP) top = warp_max(top);
    for (unsigned int c = l.from; c < l.classes; c += l.step) sum += expf(x[l.start + (size_t)c * l.stride] - top);
    return {top, 1.0f / total<WARP>(sum)};
}

// y may be x.
__device__ __forceinline__ void write(const float *x, float *y, Line l, Softmax s) {
    for (unsigned int c = l.from; c < l.classes; c += l.step) {
        const size_t i = l.start + (size_t)c * l.stride;
        y[i] = s(x[i]);
    }
}

// One row as the lanes of a warp hold it.
#if ITEMS > 0

struct Row {
    float values[ITEMS];

    __device__ __forceinline__ Row(const float *x, Line l) {
#pragma unroll
        for (int k = 0; k < ITEMS; ++k) values[k] = l.from + 32 * k < l.classes ? x[l.start + l.from + 32 * k] : LOWEST;
    }
    // The values are exp(x - top) from then on.
    __device__ __forceinline__ Softmax measure(const float *, Line l) {
        float top = LOWEST, sum = 0.0f;
#pragma unroll
        for (int k = 0; k < ITEMS; ++k) top = fmaxf(top, values[k]);
        top = warp_max(top);
#pragma unroll
        for (int k = 0; k < ITEMS; ++k) {
            values[k] = l.from + 32 * k < l.classes ? expf(values[k] - top) : 0.0f;
            sum += values[k];
        }
        return {top, 1.0f / warp_sum(sum)};
    }
    __device__ __forceinline__ void write(const float *, float *y, Line l, Softmax s) const {
#pragma unroll
        for (int k = 0; k < ITEMS; ++k)
            if (l.from + 32 * k < l.classes) y[l.start + l.from + 32 * k] = values[k] * s.inverse;
    }
};

#else

struct Row {
    __device__ __forceinline__ Row(const float *, Line) {}
    __device__ __forceinline__ Softmax measure(const float *x, Line l) const { return ::measure<true>(x, l); }
    __device__ __forceinline__ void write(const float *x, float *y, Line l, Softmax s) const { ::write(x, y, l, s); }
};

#endif

template <bool WARP>
__device__ void softmax_gradient(const float *y, const float *dy, float *dx, Line l) {
    float dot = 0.0f;
    for (unsigned int c = l.from; c < l.classes; c += l.step) {
        const size_t i = l.start + (size_t)c * l.stride;
        dot += y[i] * dy[i];
    }
    dot = total<WARP>(dot);
    for (unsigned int c = l.from; c < l.classes; c += l.step) {
        const size_t i = l.start + (size_t)c * l.stride;
        dx[i] = y[i] * (dy[i] - dot);
    }
}

// The class that a label means, or -1 where it is outside the classes.
__device__ __forceinline__ int class_of(float label, unsigned int classes) {
    return label > -1.0f && label < (float)classes ? (int)label : -1;
}

template <bool WARP>
__device__ void rank(const float *x, const float *labels, float *ranks, int *bad_label, bool higher_wins,
                     unsigned int place, Line l) {
    const int label = class_of(labels[place], l.classes);
    float better = 0.0f;
    if (label >= 0) {
        const unsigned int own_class = label;
        const float own = x[l.start + (size_t)label * l.stride];
        for (unsigned int c = l.from; c < l.classes; c += l.step) {
            const float value = x[l.start + (size_t)c * l.stride];
            better += value > own || (value == own && (c > own_class || (c < own_class && !higher_wins))) ? 1.0f : 0.0f;
        }
        better = total<WARP>(better);
    }
    if (l.from != 0) return;
    ranks[place] = label >= 0 ? better : -1.0f;
    if (label < 0) atomicMax(bad_label, (int)place);
}

#define ROWS(place) \
    for (unsigned int place = (blockIdx.x * blockDim.x + threadIdx.x) / 32; place < places; \
         place += gridDim.x * blockDim.x / 32)

#ifdef WITH_softmax_rows
extern "C" __global__ void softmax_rows(const float *x, float *y, int classes, int inner, unsigned int places) {
    ROWS(place) {
        const Line l = row_line(place, classes);
        Row row(x, l);
        const Softmax s = row.measure(x, l);
        row.write(x, y, l, s);
    }
}
#endif

#ifdef WITH_softmax_columns
extern "C" __global__ void softmax_columns(const float *x, float *y, int classes, int inner, unsigned int places) {
    EACH_INDEX(place, places) {
        const Line l = column_line(place, classes, inner);
        write(x, y, l, measure<false>(x, l));
    }
}
#endif

#ifdef WITH_gradient_rows
extern "C" __global__ void gradient_rows(const float *y, const float *dy, float *dx, int classes, int inner,
                                         unsigned int places) {
    ROWS(place) softmax_gradient<true>(y, dy, dx, row_line(place, classes));
}
#endif

#ifdef WITH_gradient_columns
extern "C" __global__ void gradient_columns(const float *y, const float *dy, float *dx, int classes, int inner,
                                            unsigned int places) {
    EACH_INDEX(place, places) softmax_gradient<false>(y, dy, dx, column_line(place, classes, inner));
}
#endif

#ifdef WITH_ranks_rows
extern "C" __global__ void ranks_rows(const float *x, const float *labels, float *ranks, int *bad_label, int higher_wins,
                                      int classes, int inner, unsigned int places) {
    ROWS(place) rank<true>(x, labels, ranks, bad_label, higher_wins, place, row_line(place, classes));
}
#endif

#ifdef WITH_ranks_columns
extern "C" __global__ void ranks_columns(const float *x, const float *labels, float *ranks, int *bad_label,
                                         int higher_wins, int classes, int inner, unsigned int places) {
    EACH_INDEX(place, places)
        rank<false>(x, labels, ranks, bad_label, higher_wins, place, column_line(place, classes, inner));
}
#endif

// Which labels do not count.
struct Ignored {
    int any, label;
    __device__ __forceinline__ bool operator()(float l) const { return any && (int)l == label; }
};

struct Loss {
    double sum, counted;
};

// The losses of a block's threads; only thread 0's result counts.
__device__ __forceinline__ Loss block_loss(Loss loss) {
    __shared__ Loss shared[32];
    const unsigned int lane = threadIdx.x % 32, warps = blockDim.x / 32;
    loss = {warp_sum(loss.sum), warp_sum(loss.counted)};
    __syncthreads();
    if (lane == 0) shared[threadIdx.x / 32] = loss;
    __syncthreads();
    if (threadIdx.x >= 32) return loss;
    loss = lane < warps ? shared[lane] : Loss{0.0, 0.0};
    return {warp_sum(loss.sum), warp_sum(loss.counted)};
}

// Adds the loss of one position; `own` is x of the label's class there, read before the softmax may have overwritten it.
__device__ __forceinline__ void add_loss(Loss &loss, Softmax s, float own, int label, bool ignored, int *bad_label,
                                         unsigned int place) {
    if (ignored) return;
    if (label < 0) {
        atomicMax(bad_label, (int)place);
        return;
    }
    loss.sum -= (double)logf(larger_of(s(own), 1.175494351e-38f));
    loss.counted += 1.0;
}

// totals = the sums over all blocks, of which the last to finish adds them up. partial is 2 * gridDim.x.
__device__ void finish_loss(Loss loss, double *partial, unsigned int *ticket, float *totals) {
    loss = block_loss(loss);
    if (gridDim.x > 1) {
        if (threadIdx.x == 0) {
            partial[2 * blockIdx.x] = loss.sum;
            partial[2 * blockIdx.x + 1] = loss.counted;
        }
        if (!is_last_block(ticket, gridDim.x)) return;
        loss = {0.0, 0.0};
        for (unsigned int b = threadIdx.x; b < gridDim.x; b += blockDim.x) {
            // From the L2 cache, where all blocks write.
            loss.sum += __ldcg(partial + 2 * b);
            loss.counted += __ldcg(partial + 2 * b + 1);
        }
        loss = block_loss(loss);
    }
    if (threadIdx.x == 0) {
        totals[0] = (float)loss.sum;
        totals[1] = (float)loss.counted;
    }
}

#define LOSS_ARGUMENTS const float *x, const float *labels, float *probabilities, double *partial, unsigned int *ticket, \
    float *totals, int *bad_label, int has_ignored, int ignored_label, int classes, int inner, unsigned int places

#ifdef WITH_loss_rows
extern "C" __global__ void loss_rows(LOSS_ARGUMENTS) {
    const Ignored ignored = {has_ignored, ignored_label};
    Loss loss = {0.0, 0.0};
    ROWS(place) {
        const Line l = row_line(place, classes);
        const float written = labels[place];
        Row row(x, l);
        const Softmax s = row.measure(x, l);
        const int label = class_of(written, classes);
        const float own = x[l.start + max(label, 0)];
        // The probabilities may be written over x: every lane has read `own` before any lane writes.
        __syncwarp();
        row.write(x, probabilities, l, s);
        if (l.from == 0) add_loss(loss, s, own, label, ignored(written), bad_label, place);
    }
    finish_loss(loss, partial, ticket, totals);
}
#endif

#ifdef WITH_loss_columns
extern "C" __global__ void loss_columns(LOSS_ARGUMENTS) {
    const Ignored ignored = {has_ignored, ignored_label};
    Loss loss = {0.0, 0.0};
    EACH_INDEX(place, places) {
        const Line l = column_line(place, classes, inner);
        const float written = labels[place];
        const Softmax s = measure<false>(x, l);
        const int label = class_of(written, classes);
        const float own = x[l.start + (size_t)max(label, 0) * inner];
        write(x, probabilities, l, s);
        add_loss(loss, s, own, label, ignored(written), bad_label, place);
    }
    finish_loss(loss, partial, ticket, totals);
}
#endif

// dx = (p - onehot) * scale, over max(totals[1], 1) if asked; 0 where the label is ignored or bad.
#ifdef WITH_loss_gradient
extern "C" __global__ void loss_gradient(const float *probabilities, const float *labels, float *dx, const float *totals,
                                         int has_ignored, int ignored_label, float scale, int divide_by_valid, int classes,
                                         int inner, unsigned int count) {
    const Ignored ignored = {has_ignored, ignored_label};
    const float factor = divide_by_valid ? scale / fmaxf(totals[1], 1.0f) : scale;
    EACH_INDEX(i, count) {
        const unsigned int line = i / inner;
        const int c = line % classes;
        const float written = labels[line / classes * inner + i % inner];
        const int label = class_of(written, classes);
        dx[i] = label < 0 || ignored(written) ? 0.0f : (probabilities[i] - (c == label ? 1.0f : 0.0f)) * factor;
    }
}
#endif

__device__ __forceinline__ float loss_of(float probability) { return -logf(larger_of(probability, 1.175494351e-38f)); }

// What smoothing adds to the loss of a position: smoothing * (the mean loss of all classes - the label's own).
template <bool WARP>
__device__ float smoothed(const float *probabilities, float written, Ignored ignored, float smoothing, Line l) {
    const int label = class_of(written, l.classes);
    if (label < 0 || ignored(written)) return 0.0f;
    float sum = 0.0f;
    for (unsigned int c = l.from; c < l.classes; c += l.step) sum += loss_of(probabilities[l.start + (size_t)c * l.stride]);
    sum = total<WARP>(sum);
    return smoothing * (sum / l.classes - loss_of(probabilities[l.start + (size_t)label * l.stride]));
}

#define SMOOTH_ARGUMENTS const float *probabilities, const float *labels, double *partial, unsigned int *ticket, \
    float *change, int has_ignored, int ignored_label, float smoothing, int classes, int inner, unsigned int places

#ifdef WITH_smooth_rows
extern "C" __global__ void smooth_rows(SMOOTH_ARGUMENTS) {
    const Ignored ignored = {has_ignored, ignored_label};
    Loss loss = {0.0, 0.0};
    ROWS(place) {
        const Line l = row_line(place, classes);
        const float own = smoothed<true>(probabilities, labels[place], ignored, smoothing, l);
        if (l.from == 0) loss.sum += own;
    }
    finish_loss(loss, partial, ticket, change);
}
#endif

#ifdef WITH_smooth_columns
extern "C" __global__ void smooth_columns(SMOOTH_ARGUMENTS) {
    const Ignored ignored = {has_ignored, ignored_label};
    Loss loss = {0.0, 0.0};
    EACH_INDEX(place, places)
        loss.sum += smoothed<false>(probabilities, labels[place], ignored, smoothing, column_line(place, classes, inner));
    finish_loss(loss, partial, ticket, change);
}
#endif

// dx += (onehot - 1 / classes) * scale, over max(totals[1], 1) if asked; nothing where the label is ignored or bad.
#ifdef WITH_smooth_gradient
extern "C" __global__ void smooth_gradient(const float *labels, float *dx, const float *totals, int has_ignored,
                                           int ignored_label, float scale, int divide_by_valid, int classes, int inner,
                                           unsigned int count) {
    const Ignored ignored = {has_ignored, ignored_label};
    const float factor = divide_by_valid ? scale / fmaxf(totals[1], 1.0f) : scale;
    EACH_INDEX(i, count) {
        const unsigned int line = i / inner;
        const int c = line % classes;
        const float written = labels[line / classes * inner + i % inner];
        const int label = class_of(written, classes);
        if (label >= 0 && !ignored(written)) dx[i] += ((c == label ? 1.0f : 0.0f) - 1.0f / classes) * factor;
    }
}
#endif

// SSD's loss on the device: matching of prior boxes with objects, mining of background, losses and gradients. Overlaps have the
// bits of the host's (caffepy/layers/detection/boxes.py), so that both match alike; sums are in double and in a fixed order.

#define UNMATCHED (-1)
#define IGNORED (-2)
#define LEFT_OUT (-1)        // in place of a label: this prior's scores do not count
#define MIN_OVERLAP 1e-6f  // overlaps up to this count as none
#define COLUMNS 8            // of an object: image, label, instance, box, difficult
#define SMALLEST 1.17549435e-38f
#define CORNER 1  // of PriorBoxParameter.CodeType; the third is CORNER_SIZE
#define CENTER_SIZE 2
#define ALL_LANES 0xffffffffu
#define INFINITE __uint_as_float(0x7f800000u)

typedef unsigned long long Key;

struct Box {
    float left, top, right, bottom;

    __device__ __forceinline__ explicit Box(const float *from) : left(from[0]), top(from[1]), right(from[2]), bottom(from[3]) {}
    __device__ __forceinline__ float size() const {
        return right < left || bottom < top ? 0.0f : __fmul_rn(__fsub_rn(right, left), __fsub_rn(bottom, top));
    }
    __device__ __forceinline__ bool crosses_border() const {
        return left < 0.0f || left > 1.0f || top < 0.0f || top > 1.0f || right < 0.0f || right > 1.0f || bottom < 0.0f || bottom > 1.0f;
    }
};

// Intersection over union. No product may become part of a fused sum, and NaN must fall as in C++'s min and max.
__device__ __forceinline__ float overlap(const Box &a, const Box &b) {
    if (b.left > a.right || b.right < a.left || b.top > a.bottom || b.bottom < a.top) return 0.0f;
    const float left = b.left < a.left ? a.left : b.left, top = b.top < a.top ? a.top : b.top;
    const float right = b.right < a.right ? b.right : a.right, bottom = b.bottom < a.bottom ? b.bottom : a.bottom;
    const float width = __fsub_rn(right, left), height = __fsub_rn(bottom, top);
    if (!(width > 0.0f && height > 0.0f)) return 0.0f;
    const float shared = __fmul_rn(width, height);
    return __fdiv_rn(shared, __fsub_rn(__fadd_rn(a.size(), b.size()), shared));
}

__device__ __forceinline__ Key larger_key(Key a, Key b) { return a > b ? a : b; }

__device__ __forceinline__ Key warp_largest(Key key) {
    for (int offset = 16; offset > 0; offset /= 2) key = larger_key(key, __shfl_xor_sync(ALL_LANES, key, offset));
    return key;
}

// Orders overlaps above 0, of equal ones the smaller index first. No overlap has the key 0.
__device__ __forceinline__ Key overlap_key(float value, int index) {
    return (Key)__float_as_uint(value) << 32 | (0xffffffffu - (unsigned int)index);
}
__device__ __forceinline__ float key_overlap(Key key) { return __uint_as_float((unsigned int)(key >> 32)); }
__device__ __forceinline__ int key_index(Key key) { return (int)(0xffffffffu - (unsigned int)key); }

__device__ __forceinline__ int image_of(const float *object) { return (int)object[0]; }
__device__ __forceinline__ int label_of(const float *object) { return (int)roundf(object[1]); }

// Whether a row is an object that counts.
__device__ __forceinline__ bool counts(const float *object) {
    return image_of(object) != -1 && label_of(object) > BACKGROUND && (DIFFICULT || object[7] == 0.0f);
}

// -- what cannot be computed with ------------------------------------------------------------------------------------------

// problem[0] becomes 1 for an object whose image or label is no number, 2 for a label that names no class, 3 for a prior without
// extent or variance, if it is 0; problem[1] the number of the row, then come its values. One block.
extern "C" __global__ void box_loss_check(const float *priors, const float *objects, float *problem, int images, int count, int rows) {
    __shared__ int first[3];
    if (threadIdx.x < 3) first[threadIdx.x] = 0x7fffffff;
    __syncthreads();
    for (int i = threadIdx.x; i < rows; i += blockDim.x) {
        const float *object = objects + (size_t)i * COLUMNS;
        if (!isfinite(object[0]) || !isfinite(object[1])) {
            atomicMin(&first[0], i);
        } else if (!AGNOSTIC && image_of(object) >= 0 && image_of(object) < images && counts(object) && label_of(object) >= CLASSES) {
            atomicMin(&first[1], i);
        }
    }
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
        const float *box = priors + 4 * (size_t)i, *variance = box + 4 * (size_t)count;
        bool good = variance[0] > 0.0f && variance[1] > 0.0f && variance[2] > 0.0f && variance[3] > 0.0f;
        if (CODE != CORNER) good = good && box[2] - box[0] > 0.0f && box[3] - box[1] > 0.0f;
        if (!good) atomicMin(&first[2], i);
    }
    __syncthreads();
    if (threadIdx.x || problem[0] != 0.0f) return;
    for (int kind = 0; kind < 3; ++kind)
        if (first[kind] != 0x7fffffff && problem[0] == 0.0f) {
            problem[0] = (float)(kind + 1);
            problem[1] = (float)first[kind];
            const float *from = kind < 2 ? objects + (size_t)first[kind] * COLUMNS : priors + 4 * (size_t)first[kind];
            for (int k = 0; k < 4; ++k) {
                problem[2 + k] = from[k];
                if (kind == 2) problem[6 + k] = from[4 * (size_t)count + k];
            }
        }
}

// -- matching: a block for each image --------------------------------------------------------------------------------------

// The free prior that an object overlaps most, for a warp.
__device__ Key best_prior(const float *priors, const Box &object, const int *matches, int count) {
    Key best = 0;
    for (int i = threadIdx.x % 32; i < count; i += 32)
        if (matches[i] == UNMATCHED) {
            const float shared = overlap(Box(priors + 4 * (size_t)i), object);
            if (shared > MIN_OVERLAP) best = larger_key(best, overlap_key(shared, i));
        }
    return warp_largest(best);
}

// The numbers of an image's objects, in their order; how many there are. One warp.
__device__ int list_objects(const float *objects, int rows, int image, int *list) {
    int found = 0;
    for (int begin = 0; begin < rows; begin += 32) {
        const int i = begin + threadIdx.x;
        const float *object = objects + (size_t)i * COLUMNS;
        const bool mine = i < rows && image_of(object) == image && counts(object);
        const unsigned int lanes = __ballot_sync(ALL_LANES, mine);
        // The lane's place is the number of lanes before it that found one: the objects keep their order.
        if (mine) list[found + __popc(lanes & ((1u << threadIdx.x) - 1))] = i;
        found += __popc(lanes);
    }
    return found;
}

// Of the objects the one with the largest overlap, of equal ones that of the first prior, then the first; -1: none. One warp.
__device__ int strongest(const Key *best, int objects) {
    Key largest = 0;
    for (int j = threadIdx.x; j < objects; j += 32) largest = larger_key(largest, best[j]);
    largest = warp_largest(largest);
    if (largest == 0) return -1;
    int chosen = 0x7fffffff;
    for (int j = threadIdx.x; j < objects && chosen == 0x7fffffff; j += 32)
        if (best[j] == largest) chosen = j;
    for (int offset = 16; offset > 0; offset /= 2) chosen = min(chosen, __shfl_xor_sync(ALL_LANES, chosen, offset));
    return chosen;
}

// matches: the row of each prior's object, UNMATCHED or IGNORED. overlaps: with it, or the largest. labels: the class that each
// prior's scores are compared with. list, best: (images, rows). found: the image's objects and its matches.
extern "C" __global__ void box_loss_match(const float *priors, const float *objects, int *matches, float *overlaps, int *labels,
                                          int *nearest, int *list, Key *best, int *found, int count, int rows) {
    __shared__ int number, chosen, matched;
    const int image = blockIdx.x, warp = threadIdx.x / 32, warps = blockDim.x / 32;
    matches += (size_t)image * count, overlaps += (size_t)image * count, labels += (size_t)image * count;
    nearest += (size_t)image * count, list += (size_t)image * rows, best += (size_t)image * rows;
    if (threadIdx.x < 32) {
        const int listed = list_objects(objects, rows, image, list);
        if (threadIdx.x == 0) number = listed, matched = 0;
        for (int j = threadIdx.x; j < listed; j += 32) best[j] = 0;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
        const Box prior(priors + 4 * (size_t)i);
        const bool ignored = IGNORE_CROSSING && number && prior.crosses_border();
        float most = 0.0f;
        int with = UNMATCHED;
        for (int j = 0; !ignored && j < number; ++j) {
            const float shared = overlap(prior, Box(objects + (size_t)list[j] * COLUMNS + 3));
            if (shared > MIN_OVERLAP) atomicMax(best + j, overlap_key(shared, i));
            if (shared > MIN_OVERLAP && shared > most) most = shared, with = list[j];
        }
        matches[i] = ignored ? IGNORED : UNMATCHED;
        overlaps[i] = most;
        nearest[i] = with;
    }
    __syncthreads();
    // Each object gets a prior of its own, the strongest pair first.
    while (true) {
        if (threadIdx.x < 32) {
            const int j = strongest(best, number);
            if (threadIdx.x == 0) chosen = j;
        }
        __syncthreads();
        if (chosen < 0) break;
        // All threads read the pair; behind the next barrier one thread clears it.
        const Key pair = best[chosen];
        const int prior = key_index(pair);
        __syncthreads();
        if (threadIdx.x == 0) {
            matches[prior] = list[chosen];
            overlaps[prior] = key_overlap(pair);
            best[chosen] = 0;
        }
        __syncthreads();
        for (int j = warp; j < number; j += warps)
            // The prior is taken: only the objects that wanted it look for another one.
            if (best[j] && key_index(best[j]) == prior) {
                const Key key = best_prior(priors, Box(objects + (size_t)list[j] * COLUMNS + 3), matches, count);
                if (threadIdx.x % 32 == 0) best[j] = key;
            }
        __syncthreads();
    }
    const int free_label = MINES ? number ? BACKGROUND : LEFT_OUT : FREE_LABEL;
    int own = 0;
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
        if (PER_PREDICTION && matches[i] == UNMATCHED && nearest[i] >= 0 && overlaps[i] >= THRESHOLD) matches[i] = nearest[i];
        const bool has = matches[i] >= 0;
        const int label = has && !AGNOSTIC ? label_of(objects + (size_t)matches[i] * COLUMNS) : BACKGROUND + 1;
        labels[i] = has ? min(label, CLASSES - 1) : free_label;
        own += has;
    }
    atomicAdd(&matched, own);
    __syncthreads();
    if (threadIdx.x == 0) found[2 * image] = number, found[2 * image + 1] = matched;
}

// -- scores: a warp for each prior -----------------------------------------------------------------------------------------

// A row of scores for a warp: what its softmax is made of.
struct Softmax {
    float largest, total;

    __device__ __forceinline__ explicit Softmax(const float *scores) {
        largest = -INFINITE;
        for (int c = threadIdx.x % 32; c < CLASSES; c += 32) largest = larger_of(largest, scores[c]);
        for (int offset = 16; offset > 0; offset /= 2) largest = larger_of(largest, __shfl_xor_sync(ALL_LANES, largest, offset));
        total = 0.0f;
        for (int c = threadIdx.x % 32; c < CLASSES; c += 32) total += expf(scores[c] - largest);
        total = warp_sum(total);
    }
    __device__ __forceinline__ float operator()(float score) const { return expf(score - largest) / total; }
};

#define EACH_ROW(row, rows)                                                                                     \
    for (unsigned int row = (blockIdx.x * blockDim.x + threadIdx.x) / 32, step = gridDim.x * blockDim.x / 32; \
         row < (rows); row += step)

// How wrong each prior's scores are about its label.
extern "C" __global__ void box_loss_of_scores(const float *scores, const int *labels, float *losses, unsigned int rows) {
    EACH_ROW(row, rows) {
        const float *x = scores + (size_t)row * CLASSES;
        const int label = labels[row];
        float loss = 0.0f;
        if (label != LEFT_OUT && LOGISTIC) {
            for (int c = threadIdx.x % 32; c < CLASSES; c += 32)
                loss += larger_of(x[c], 0.0f) - (c == label ? x[c] : 0.0f) + log1pf(expf(-fabsf(x[c])));
            loss = warp_sum(loss);
        } else if (label != LEFT_OUT) {
            loss = -logf(larger_of(Softmax(x)(x[label]), SMALLEST));
        }
        if (threadIdx.x % 32 == 0) losses[row] = loss;
    }
}

// The derivative of the losses that count by the scores.
extern "C" __global__ void box_loss_scores_gradient(const float *scores, const int *labels, float *gradient, unsigned int rows) {
    EACH_ROW(row, rows) {
        const float *x = scores + (size_t)row * CLASSES;
        float *dx = gradient + (size_t)row * CLASSES;
        const int label = labels[row];
        if (label == LEFT_OUT) {
            for (int c = threadIdx.x % 32; c < CLASSES; c += 32) dx[c] = 0.0f;
        } else if (LOGISTIC) {
            for (int c = threadIdx.x % 32; c < CLASSES; c += 32) {
                const float small = expf(-fabsf(x[c]));
                dx[c] = (x[c] >= 0.0f ? 1.0f : small) / (1.0f + small) - (c == label ? 1.0f : 0.0f);
            }
        } else {
            const Softmax softmax(x);
            for (int c = threadIdx.x % 32; c < CLASSES; c += 32) dx[c] = softmax(x[c]) - (c == label ? 1.0f : 0.0f);
        }
    }
}

// -- predicted boxes -------------------------------------------------------------------------------------------------------

// Prediction less encoded object of a matched prior.
__device__ __forceinline__ void difference(const float *prior, const float *variance, const float *codes, const float *object,
                                           float (&result)[4]) {
    const float width = prior[2] - prior[0], height = prior[3] - prior[1];
    for (int k = 0; k < 4; ++k) {
        const float side = k % 2 ? height : width;
        float wanted;
        if (CODE == CENTER_SIZE && k < 2) {
            wanted = ((object[k] + object[k + 2]) / 2.0f - (prior[k] + prior[k + 2]) / 2.0f) / side;
        } else if (CODE == CENTER_SIZE) {
            wanted = logf((object[k] - object[k - 2]) / side);
        } else {
            wanted = (object[k] - prior[k]) / (CODE == CORNER ? 1.0f : side);
        }
        const float predicted = VARIANCE_IN_TARGET ? codes[k] / variance[k] : codes[k];
        result[k] = INSIDE && (prior[k] < 0.0f || prior[k] > 1.0f) ? 0.0f : predicted - wanted / variance[k];
    }
}

__device__ __forceinline__ float box_loss_of(float d) {
    const float size = fabsf(d);
    return SQUARED || size < 1.0f ? 0.5f * d * d : size - 0.5f;
}

// The derivative of the boxes' loss by the predictions.
extern "C" __global__ void box_loss_boxes_gradient(const float *locations, const float *priors, const float *objects,
                                                   const int *matches, float *gradient, int count, unsigned int rows) {
    EACH_INDEX(i, rows) {
        const int prior = i % count, object = matches[i];
        float d[4] = {};
        if (object >= 0)
            difference(priors + 4 * (size_t)prior, priors + 4 * ((size_t)count + prior), locations + 4 * (size_t)i,
                       objects + (size_t)object * COLUMNS + 3, d);
        for (int k = 0; k < 4; ++k)
            gradient[4 * (size_t)i + k] = WEIGHT * (SQUARED ? d[k] : d[k] < -1.0f ? -1.0f : d[k] > 1.0f ? 1.0f : d[k]);
    }
}

// -- mining and sums: a block for each image -------------------------------------------------------------------------------

// Orders losses; what is no number counts as the largest.
__device__ __forceinline__ unsigned int loss_key(float loss) {
    const unsigned int bits = __float_as_uint(loss != loss ? INFINITE : loss + 0.0f);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

__device__ __forceinline__ bool is_candidate(const int *matches, const float *overlaps, int i) {
    return matches[i] == UNMATCHED && overlaps[i] < MAX_OVERLAP;
}

// The sum over the block before this thread, in the threads' order, and the whole sum; all threads call it.
__device__ int before(int value, int &whole) {
    __shared__ int sums[32];
    int sum = value;
    for (int offset = 1; offset < 32; offset *= 2) {
        const int other = __shfl_up_sync(ALL_LANES, sum, offset);
        if (threadIdx.x % 32 >= offset) sum += other;
    }
    __syncthreads();
    if (threadIdx.x % 32 == 31) sums[threadIdx.x / 32] = sum;
    __syncthreads();
    int earlier = 0;
    whole = 0;
    for (int w = 0; w < blockDim.x / 32; ++w) {
        if (w < threadIdx.x / 32) earlier += sums[w];
        whole += sums[w];
    }
    return earlier + sum - value;
}

// The `wanted` candidates with the largest losses become background, of equal losses the first; scores of other priors without
// an object do not count.
__device__ void mine(const int *matches, const float *overlaps, const float *losses, int *labels, int matched, int count) {
    __shared__ int bins[256];
    __shared__ unsigned int prefix;
    __shared__ int rest;
    int candidates = 0, all;
    for (int i = threadIdx.x; i < count; i += blockDim.x) candidates += is_candidate(matches, overlaps, i);
    before(candidates, all);
    // The product is rounded by itself, as on the host: both mine the same number.
    const int wanted = min((int)__fmul_rn((float)matched, RATIO), all);
    if (threadIdx.x == 0) prefix = 0, rest = wanted;
    // The key of the last one that is taken, eight bits at a time from the highest; `rest` of those with it are taken.
    for (int shift = 24; shift >= 0; shift -= 8) {
        for (int b = threadIdx.x; b < 256; b += blockDim.x) bins[b] = 0;
        __syncthreads();
        const unsigned int known = shift == 24 ? 0u : ~0u << (shift + 8);
        for (int i = threadIdx.x; i < count; i += blockDim.x) {
            const unsigned int key = loss_key(losses[i]);
            if ((key & known) == prefix && is_candidate(matches, overlaps, i)) atomicAdd(&bins[key >> shift & 255u], 1);
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            int b = 255;
            while (b > 0 && bins[b] < rest) rest -= bins[b--];
            prefix |= (unsigned int)b << shift;
        }
        __syncthreads();
    }
    int taken = 0;
    for (int begin = 0; begin < count; begin += blockDim.x) {
        const int i = begin + threadIdx.x;
        const bool candidate = i < count && is_candidate(matches, overlaps, i);
        const unsigned int key = candidate ? loss_key(losses[i]) : 0u;
        int equals;
        // The candidates with the last key count in the order of the priors, so that ties fall as on the host.
        const int earlier = taken + before(candidate && key == prefix, equals);
        const bool chosen = candidate && wanted > 0 && (key > prefix || (key == prefix && earlier < rest));
        if (i < count && matches[i] < 0) labels[i] = chosen ? BACKGROUND : LEFT_OUT;
        taken += equals;
    }
    __syncthreads();
}

// Chooses the image's background and adds up its losses: sums has the boxes', the scores' and the number of matches (images, 3).
extern "C" __global__ void box_loss_mine(const float *locations, const float *priors, const float *objects, const int *matches,
                                         const float *overlaps, const float *losses, int *labels, const int *found, double *sums,
                                         int count) {
    const int image = blockIdx.x;
    const size_t first = (size_t)image * count;
    matches += first, overlaps += first, losses += first, labels += first;
    if (MINES && found[2 * image]) mine(matches, overlaps, losses, labels, found[2 * image + 1], count);
    double boxes = 0.0, scores = 0.0;
    for (int i = threadIdx.x; i < count; i += blockDim.x) {
        if (labels[i] != LEFT_OUT) scores += losses[i];
        if (matches[i] < 0) continue;
        float d[4];
        difference(priors + 4 * (size_t)i, priors + 4 * ((size_t)count + i), locations + 4 * (first + i),
                   objects + (size_t)matches[i] * COLUMNS + 3, d);
        for (int k = 0; k < 4; ++k) boxes += box_loss_of(d[k]);
    }
    boxes = block_sum(boxes);
    scores = block_sum(scores);
    if (threadIdx.x == 0) sums[3 * image] = boxes, sums[3 * image + 1] = scores, sums[3 * image + 2] = found[2 * image + 1];
}

// totals: the loss of all images, and their matches. One block.
extern "C" __global__ void box_loss_total(const double *sums, float *totals, int images) {
    double part[3] = {};
    for (int i = threadIdx.x; i < images; i += blockDim.x)
        for (int k = 0; k < 3; ++k) part[k] += sums[3 * i + k];
    const double boxes = block_sum(part[0]), scores = block_sum(part[1]), matches = block_sum(part[2]);
    if (threadIdx.x) return;
    totals[0] = (float)((BOXES_COUNT ? (double)WEIGHT * boxes : 0.0) + (SCORES_COUNT ? scores : 0.0));
    totals[1] = (float)matches;
}

// Depthwise convolutions by threads that walk down their columns, put after depthwise_tiles.cu. A thread takes strips of TILE_W
// columns by `strip` rows of results. A step computes TILE_H rows. The rows of the source that the next step needs as well stay
// in registers, so that a thread loads each row once; it does so AHEAD steps before it needs them.
//
// Standing before, beside what depthwise_tiles.cu needs: AHEAD; RESIDENT, the blocks of a multiprocessor, for which registers must
// do; SOURCE_ALWAYS and OWN_ALWAYS, a bit for each column of the source and of the results that lies within the image in all
// strips; GRADIENTS (1: both gradients; DATA is 1 then, and RELU says whether the bottom was rectified); for other results BIAS,
// RELU and SUMS as in depthwise.cu, NORMALISED (1: of a batch normalisation of the source) and RECTIFIED (1: which is rectified).

constexpr int ADVANCE = DATA ? TILE_H / STRIDE_H : TILE_H * STRIDE_H;  // rows of the source from a step to the next
constexpr int KEPT = Rows::LENGTH - ADVANCE;
// Windows far apart would fill the registers: there each step loads its rows when it needs them.
constexpr bool KEEPS = KEPT >= 0 && Rows::LENGTH <= 4 && Columns::LENGTH <= 12;

__device__ constexpr int common_divisor(int a, int b) { return b == 0 ? a : common_divisor(b, a % b); }

constexpr int PHASES = KEEPS ? Rows::LENGTH / common_divisor(Rows::LENGTH, ADVANCE) : 1;  // steps until rows lie as before

// Which of so many columns from `left` on lie within the width, a bit each; those of ALWAYS are known to.
template <int NUMBER, unsigned int ALWAYS>
__device__ __forceinline__ unsigned int columns_within(int left, int width) {
    unsigned int bits = ALWAYS;
#pragma unroll
    for (int q = 0; q < NUMBER; ++q)
        if (!(ALWAYS >> q & 1u)) bits |= (unsigned int)within(left + q, width) << q;
    return bits;
}

__device__ __forceinline__ STORED *moved(STORED *at, size_t bytes) {
    return reinterpret_cast<STORED *>(reinterpret_cast<char *>(at) + bytes);
}

__device__ __forceinline__ const STORED *moved(const STORED *at, size_t bytes) {
    return reinterpret_cast<const STORED *>(reinterpret_cast<const char *>(at) + bytes);
}

// Neighbouring pixels, so many bytes apart, of a row that exists or not; zeros where a bit of `inside` is not set.
template <unsigned int ALWAYS, int NUMBER>
__device__ __forceinline__ void load_pixels(Raw (&row)[NUMBER], const STORED *at, bool exists, unsigned int inside,
                                            unsigned int pixel) {
#pragma unroll
    for (int q = 0; q < NUMBER; ++q) {
        if (exists && ((ALWAYS >> q & 1u) || (inside >> q & 1u))) {
            row[q].load(moved(at, (size_t)pixel * q));
        } else {
            row[q].clear();
        }
    }
}

typedef Raw RawRow[Columns::LENGTH];
typedef Values Row[Columns::LENGTH];

// The rows of the source under a strip.
struct Source {
    const STORED *at;  // of the next row
    size_t row;        // bytes of a row
    unsigned int pixel, inside;
    int line, lines;

    __device__ __forceinline__ Source(const STORED *from, int n, int line, int lines, int left, int width, int packs, int pack)
        : at(from + ((((long long)n * lines + line) * width + left + Columns::FIRST) * packs + pack) * WIDTH),
          row((size_t)width * packs * WIDTH * sizeof(STORED)), pixel(packs * WIDTH * sizeof(STORED)),
          inside(columns_within<Columns::LENGTH, SOURCE_ALWAYS>(left + Columns::FIRST, width)), line(line), lines(lines) {}

    __device__ __forceinline__ void next(RawRow &pixels) {
        load_pixels<SOURCE_ALWAYS>(pixels, at, within(line, lines), inside, pixel);
        at = moved(at, row);
        ++line;
    }
};

// The rows that a step needs. Row p of the step `phase` of PHASES lies at (phase * ADVANCE + p) % LENGTH.
struct Window {
    Row rows[KEEPS ? Rows::LENGTH : 1];

    __device__ __forceinline__ Row &row(int phase, int p) { return rows[KEEPS ? (phase * ADVANCE + p) % Rows::LENGTH : 0]; }
};

// What a step finds loaded: the rows that are new to it, and of gradients the pixels of x under its results.
struct Fresh {
    RawRow rows[KEEPS ? ADVANCE : 1];
    Raw own[GRADIENTS ? TILE_H : 1][TILE_W];
};

// Where a strip lies, and its results in memory.
struct Strip {
    unsigned int n, inside, pixel;
    int top, end, left;
    size_t begin, row;  // elements before the first one, bytes of a row

    __device__ __forceinline__ Strip(unsigned int over_column, unsigned int n, unsigned int tile, unsigned int tile_rows,
                                     unsigned int tile_columns, int strip, int height, int width, int packs, int pack)
        : n(n), pixel(packs * WIDTH * sizeof(STORED)), top((over_column - n * tile_rows) * strip), end(min(top + strip, height)),
          left((tile - over_column * tile_columns) * TILE_W),
          begin((((size_t)(n * height + top) * width + left) * packs + pack) * WIDTH), row((size_t)width * pixel) {
        inside = columns_within<TILE_W, OWN_ALWAYS>(left, width);
    }

    __device__ __forceinline__ bool counts(int j) const { return OWN_ALWAYS >> j & 1u || inside >> j & 1u; }
};

// Calls use(i, number of the weight, p, q, j) for each pixel (i, j) of a step's results and weight (k, l) that meet at pixel (p, q) of its source,
// after row(p) for each row p.
template <typename EachRow, typename Use>
__device__ __forceinline__ void each_product(EachRow row, Use use) {
#pragma unroll
    for (int p = 0; p < Rows::LENGTH; ++p) {
        row(p);
#pragma unroll
        for (int k = 0; k < KERNEL_H; ++k) {
            const int i = Rows::result(k, p);
            if (i < 0 || i >= TILE_H) continue;
#pragma unroll
            for (int l = 0; l < KERNEL_W; ++l)
#pragma unroll
                for (int j = 0; j < TILE_W; ++j) {
                    const int q = Columns::pixel(j, l);
                    if (q >= 0) use(i, k * KERNEL_W + l, p, q, j);
                }
        }
    }
}

// Walks down a strip: convert(row, loaded, line, inside) gives a row of the source as floats, step(first row, products, the pixels
// of x) takes the results' rows in turn; products(use) calls use(i, j, weight's number, the source's pixel).
template <typename Convert, typename Step>
__device__ __forceinline__ void walk(const Strip &strip, Source source, const STORED *x, int height, Convert convert, Step step) {
    Window window;
    Fresh fresh[AHEAD];
    const STORED *own = GRADIENTS ? x + strip.begin : x;
    int line = source.line;
    const auto fetch = [&](Fresh &into, int row) {
        if constexpr (KEEPS) {
#pragma unroll
            for (int a = 0; a < ADVANCE; ++a) source.next(into.rows[a]);
        }
        if constexpr (GRADIENTS) {
#pragma unroll
            for (int i = 0; i < TILE_H; ++i) {
                load_pixels<OWN_ALWAYS>(into.own[i], own, TILE_H == 1 || row + i < height, strip.inside, strip.pixel);
                own = moved(own, strip.row);
            }
        }
    };
    if constexpr (KEEPS) {
#pragma unroll
        for (int p = 0; p < KEPT; ++p) {
            RawRow loaded;
            source.next(loaded);
            convert(window.row(0, p), loaded, line++, source.inside);
        }
    }
#pragma unroll
    for (int a = 0; a < AHEAD; ++a) fetch(fresh[a], strip.top + a * TILE_H);
    for (int row = strip.top; row < strip.end;) {
        // The rows stay where they are and the index rotates. Unrolled over its period, every index is known to the
        // compiler, and so the rows are registers.
#pragma unroll
        for (int phase = 0; phase < PHASES; ++phase) {
            if (row >= strip.end) break;
            if constexpr (KEEPS) {
#pragma unroll
                for (int a = 0; a < ADVANCE; ++a)
                    convert(window.row(phase, KEPT + a), fresh[0].rows[a], line + a, source.inside);
            }
            const Fresh now = fresh[0];
#pragma unroll
            for (int a = 1; a < AHEAD; ++a) fresh[a - 1] = fresh[a];
            // Asked for before this step computes: the memory answers during AHEAD steps.
            if (row + AHEAD * TILE_H < strip.end) fetch(fresh[AHEAD - 1], row + AHEAD * TILE_H);
            Source here = source;
            const auto each_row = [&](int p) {
                if constexpr (!KEEPS) {
                    RawRow loaded;
                    here.next(loaded);
                    convert(window.row(0, p), loaded, line + p, source.inside);
                }
            };
            step(row, now, [&](auto use) {
                each_product(each_row, [&](int i, int weight, int p, int q, int j) { use(i, j, weight, window.row(phase, p)[q]); });
            });
            if constexpr (!KEEPS) source.at = moved(source.at, ADVANCE * source.row), source.line += ADVANCE;
            line += ADVANCE;
            row += TILE_H;
        }
    }
}

// Writes the rows of results of a step, those that there are, and moves on to the next step's; before it writes one, it calls
// finish(result, i, j, whether it lies within the image).
template <typename Finish>
__device__ __forceinline__ void store_step(STORED *&out, Values (&results)[TILE_H][TILE_W], const Strip &strip, int row, int height,
                                           Finish finish) {
#pragma unroll
    for (int i = 0; i < TILE_H; ++i) {
#pragma unroll
        for (int j = 0; j < TILE_W; ++j) {
            const bool counts = (TILE_H == 1 || row + i < height) && strip.counts(j);
            finish(results[i][j], i, j, counts);
            if (counts) store<WIDTH>(moved(out, (size_t)strip.pixel * j), 0, results[i][j]);
        }
        out = moved(out, strip.row);
    }
}

__device__ __forceinline__ Values floats(const Raw &raw) {
    Values values;
#pragma unroll
    for (int v = 0; v < WIDTH; ++v) values[v] = raw[v];
    return values;
}

// The bottom, from what is normalised.
__device__ __forceinline__ Values normalise(const Raw &x, const Values &factor, const Values &shift, bool counts, bool rectified) {
    Values result;
#pragma unroll
    for (int v = 0; v < WIDTH; ++v) {
        const float normal = __fmaf_rn(factor[v], x[v], shift[v]);
        result[v] = !counts ? 0.0f : rectified ? larger_of(normal, 0.0f) : normal;
    }
    return result;
}

#define EACH_STRIP                                                                                                           \
    for (unsigned int tile = blockIdx.y * blockDim.y + threadIdx.y, over_column = 0, n = 0;                                  \
         pack < packs && tile < tiles && (over_column = by_columns(tile), n = by_rows(over_column), true);                   \
         tile += gridDim.y * blockDim.y)

#if GRADIENTS
constexpr int NUMBERS = AREA + 2;  // that are added up for each channel

// Both gradients of a convolution whose bottom is a batch normalisation of x, with RELU rectified, and the two sums that the
// normalisation's own gradient needs. Everything is read once: dy, and x, from which the bottom is computed anew. Leaves in `parts`
// for each of the gridDim.y blocks of a channel dweights (C, KERNEL_H, KERNEL_W), the sums of g and the sums of g * (x - mean), both
// (C); g is dx where the rectifier was on. height x width are those of x and dx.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
walk_gradients(const STORED *x, const STORED *dy, const STORED *weights, const float *mean, const float *inverse,
               const float *scale, const float *bias, STORED *dx, float *parts, int height, int width, int source_height,
               int source_width, int rows, TILES_OF) {
    __shared__ alignas(16) float w[AREA * CHANNELS], factors[CHANNELS], shifts[CHANNELS], means[CHANNELS];
    const int pack = blockIdx.x * blockDim.x + threadIdx.x, channels = blockDim.x * WIDTH, all = packs * WIDTH;
    const int thread = threadIdx.y * blockDim.x + threadIdx.x;
    load_weights(w, weights, packs);
    load_normalisation(factors, shifts, mean, inverse, scale, bias, packs);
    if (thread < channels && blockIdx.x * channels + thread < all) means[thread] = mean[blockIdx.x * channels + thread];
    __syncthreads();
    const Values factor = load<WIDTH>(factors, threadIdx.x), shift = load<WIDTH>(shifts, threadIdx.x);
    const Values centre = load<WIDTH>(means, threadIdx.x);
    Values sums[NUMBERS] = {};
    Values &first = sums[AREA], &second = sums[AREA + 1];
    EACH_STRIP {
        const Strip strip(over_column, n, tile, tile_rows, tile_columns, rows, height, width, packs, pack);
        const Source source(dy, n, Rows::source(strip.top) + Rows::FIRST, source_height, Columns::source(strip.left), source_width,
                            packs, pack);
        STORED *out = dx + strip.begin;
        const auto convert = [&](Row &row, const RawRow &loaded, int, unsigned int) {
#pragma unroll
            for (int q = 0; q < Columns::LENGTH; ++q) row[q] = floats(loaded[q]);
        };
        walk(strip, source, x, height, convert, [&](int row, const Fresh &now, auto products) {
            Values bottom[TILE_H][TILE_W], results[TILE_H][TILE_W] = {};
#pragma unroll
            for (int i = 0; i < TILE_H; ++i)
#pragma unroll
                for (int j = 0; j < TILE_W; ++j)
                    bottom[i][j] = normalise(now.own[i][j], factor, shift, (TILE_H == 1 || row + i < height) && strip.counts(j), RELU);
            products([&](int i, int j, int number, const Values &from) {
                const Values weight = load<WIDTH>(w, number * blockDim.x + threadIdx.x);
#pragma unroll
                for (int v = 0; v < WIDTH; ++v) {
                    results[i][j][v] = fmaf(from[v], weight[v], results[i][j][v]);
                    sums[number][v] = fmaf(from[v], bottom[i][j][v], sums[number][v]);
                }
            });
            store_step(out, results, strip, row, height, [&](const Values &result, int i, int j, bool counts) {
#pragma unroll
                for (int v = 0; v < WIDTH; ++v) {
                    // Beyond the image the bottom is 0 (`normalise`), so the rectifier's test covers that too.
                    const float g = (RELU ? bottom[i][j][v] > 0.0f : counts) ? result[v] : 0.0f;
                    first[v] += g;
                    second[v] = fmaf(g, now.own[i][j][v] - centre[v], second[v]);
                }
            });
        });
    }
    float *const mine = parts + (size_t)blockIdx.y * all * NUMBERS;
    sums_of_block(sums, packs, [&](int k, int channel, float sum) {
        mine[k < AREA ? channel * AREA + k : all * k + channel] = sum;
    });
}
#else
// y of x, or with DATA dx of dy; see `depthwise` in depthwise.cu.
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
walk_forward(const STORED *source, const STORED *weights, const float *bias, const float *mean, const float *inverse, const float *scale,
             const float *beta, STORED *results, float *parts, int height, int width, int source_height, int source_width, int rows,
             TILES_OF) {
    __shared__ alignas(16) float w[AREA * CHANNELS], factors[NORMALISED ? CHANNELS : 1], shifts[NORMALISED ? CHANNELS : 1];
    const int pack = blockIdx.x * blockDim.x + threadIdx.x;
    load_weights(w, weights, packs);
    if (NORMALISED) load_normalisation(factors, shifts, mean, inverse, scale, beta, packs);
    __syncthreads();
    Values sums[2] = {}, factor = {}, shift = {};
    if (NORMALISED) factor = load<WIDTH>(factors, threadIdx.x), shift = load<WIDTH>(shifts, threadIdx.x);
    EACH_STRIP {
        const Strip strip(over_column, n, tile, tile_rows, tile_columns, rows, height, width, packs, pack);
        const Source from(source, n, Rows::source(strip.top) + Rows::FIRST, source_height, Columns::source(strip.left), source_width,
                          packs, pack);
        STORED *out = results + strip.begin;
        const auto convert = [&](Row &row, const RawRow &loaded, int line, unsigned int inside) {
#pragma unroll
            for (int q = 0; q < Columns::LENGTH; ++q) {
                const bool counts = within(line, source_height) && (SOURCE_ALWAYS >> q & 1u || inside >> q & 1u);
                row[q] = NORMALISED ? normalise(loaded[q], factor, shift, counts, RECTIFIED) : floats(loaded[q]);
            }
        };
        walk(strip, from, source, height, convert, [&](int row, const Fresh &, auto products) {
            Values y[TILE_H][TILE_W] = {};
            products([&](int i, int j, int number, const Values &pixel) {
                const Values weight = load<WIDTH>(w, number * blockDim.x + threadIdx.x);
#pragma unroll
                for (int v = 0; v < WIDTH; ++v) y[i][j][v] = fmaf(pixel[v], weight[v], y[i][j][v]);
            });
            store_step(out, y, strip, row, height, [&](Values &result, int, int, bool counts) {
#pragma unroll
                for (int v = 0; v < WIDTH; ++v) {
                    const float one = counts ? result[v] : 0.0f;
                    if (SUMS) sums[0][v] += one, sums[1][v] = fmaf(one, one, sums[1][v]);
                    if (BIAS) result[v] += bias[pack * WIDTH + v];
                    if (RELU) result[v] = larger_of(result[v], 0.0f);
                }
            });
        });
    }
    if constexpr (SUMS)
        sums_of_block(sums, packs, [&](int k, int channel, float sum) {
            parts[((size_t)blockIdx.y * 2 + k) * packs * WIDTH + channel] = sum;
        });
}
#endif

// Space-to-depth: blocks of pixels of channels-last arrays become channels of one pixel, and back; with STEP 1, arrays get
// more channels.
//
// The text before this file defines the types In and Out and the constants HEIGHT, WIDTH, CHANNELS of the plain array,
// FOLDED_HEIGHT, FOLDED_WIDTH, FOLDED_CHANNELS of the folded one, STEP (side of a block), SHIFT_H, SHIFT_W (zeros before the
// first pixel), TOGETHER (pixels of a row that are gathered) and PACK (folded channels a thread writes).

// folded[n][i][j][(d, a, b, c)] = plain[n][i * STEP + a - SHIFT_H][(j + d) * STEP + b - SHIFT_W][c], 0 outside and for n >= rows;
// d counts the pixels put together, (a, b, c) the channels of one, with zeros after the last. One thread for PACK channels.
extern "C" __global__ void fold(const In *plain, Out *folded, unsigned int rows, unsigned int count) {
    constexpr unsigned int PACKS = FOLDED_CHANNELS / PACK, OWN = FOLDED_CHANNELS / TOGETHER;
    EACH_INDEX(i, count) {
        const unsigned int at = i % PACKS * PACK;
        const int first = at % OWN;
        unsigned int rest = i / PACKS;
        const int x = (int)(rest % FOLDED_WIDTH + at / OWN) * STEP - SHIFT_W;
        rest /= FOLDED_WIDTH;
        const int y = (int)(rest % FOLDED_HEIGHT) * STEP - SHIFT_H;
        const unsigned int n = rest / FOLDED_HEIGHT;
        Pack<float, PACK> values;
#pragma unroll
        for (int v = 0; v < PACK; ++v) {
            const int place = (first + v) / CHANNELS, c = (first + v) % CHANNELS;
            const int yy = y + place / STEP, xx = x + place % STEP;
            const bool inside = n < rows && place < STEP * STEP && yy >= 0 && yy < HEIGHT && xx >= 0 && xx < WIDTH;
            values[v] = inside ? to_float(plain[((size_t)(n * HEIGHT + yy) * WIDTH + xx) * CHANNELS + c]) : 0.0f;
        }
        store<PACK>(folded, i, values);
    }
}

// plain (+)= what `fold` would have put into `folded`, 0 where that has no pixel for it. One thread an element of plain.
extern "C" __global__ void unfold(const In *folded, Out *plain, int accumulate, unsigned int count) {
    EACH_INDEX(i, count) {
        const unsigned int c = i % CHANNELS;
        unsigned int rest = i / CHANNELS;
        const unsigned int x = rest % WIDTH + SHIFT_W;
        rest /= WIDTH;
        const unsigned int y = rest % HEIGHT + SHIFT_H, n = rest / HEIGHT;
        const unsigned int channel = (y % STEP * STEP + x % STEP) * CHANNELS + c;
        float value = 0.0f;
        if (y / STEP < FOLDED_HEIGHT && x / STEP < FOLDED_WIDTH) {
            const size_t place = (size_t)(n * FOLDED_HEIGHT + y / STEP) * FOLDED_WIDTH + x / STEP;
            value = to_float(folded[place * FOLDED_CHANNELS + channel]);
        }
        plain[i] = Rounded<Out>::one(accumulate ? to_float(plain[i]) + value : value);
    }
}

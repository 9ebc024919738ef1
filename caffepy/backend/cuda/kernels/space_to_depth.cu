// Space-to-depth: blocks of pixels of channels-last arrays become channels of one pixel, and back; with blocks of one pixel, arrays
// get more channels. The text before this file defines the types In and Out, and PACK (folded channels a thread writes).
// Sizes are arguments, so that one kernel serves every shape.

// Of the plain array and of the folded one; `step`: side of a block, shift: zeros before the first pixel, own: folded channels of
// one pixel, of which several of a row may be gathered; packs: of the folded channels.
#define SIZES                                                                                                     \
    int height, int width, unsigned int channels, Divider by_channels, unsigned int folded_height,                \
    Divider by_folded_height, unsigned int folded_width, Divider by_folded_width, unsigned int packs,             \
    Divider by_packs, unsigned int own, Divider by_own, int step, Divider by_step, int shift_h, int shift_w

// folded[n][i][j][(d, a, b, c)] = plain[n][i * step + a - shift_h][(j + d) * step + b - shift_w][c], 0 outside and for n >= rows;
// d counts the pixels put together, (a, b, c) the channels of one, with zeros after the last. One thread for PACK channels.
extern "C" __global__ void fold(const In *plain, Out *folded, unsigned int rows, unsigned int count, SIZES) {
    EACH_INDEX(i, count) {
        const unsigned int over_packs = by_packs(i), over_width = by_folded_width(over_packs), n = by_folded_height(over_width);
        const unsigned int at = (i - over_packs * packs) * PACK, d = by_own(at), first = at - d * own;
        const int left = (int)(over_packs - over_width * folded_width + d) * step - shift_w;
        const int top = (int)(over_width - n * folded_height) * step - shift_h;
        const unsigned int place = by_channels(first), down = by_step(place);
        // Row and column within the block, and channel; they count on from element to element.
        int a = down, b = place - down * step;
        unsigned int c = first - place * channels;
        const In *row = plain + (((long long)n * height + top + a) * width + left) * channels;
        Pack<float, PACK> values;
#pragma unroll
        for (int v = 0; v < PACK; ++v) {
            const int y = top + a, x = left + b;
            const bool inside = n < rows && a < step && y >= 0 && y < height && x >= 0 && x < width;
            values[v] = inside ? to_float(row[b * (int)channels + (int)c]) : 0.0f;
            if (++c == channels) {
                c = 0;
                if (++b == step) b = 0, ++a, row += (long long)width * channels;
            }
        }
        store<PACK>(folded, i, values);
    }
}

// plain (+)= what `fold` would have put into `folded`, 0 where that has no pixel for it. One thread an element of plain.
extern "C" __global__ void unfold(const In *folded, Out *plain, int accumulate, unsigned int count, SIZES) {
    EACH_INDEX(i, count) {
        const unsigned int pixel = i / channels, c = i - pixel * channels;
        const unsigned int line = pixel / width, n = line / height;
        const unsigned int x = pixel - line * width + shift_w, y = line - n * height + shift_h;
        const unsigned int column = by_step(x), row = by_step(y);
        const unsigned int channel = ((y - row * step) * step + x - column * step) * channels + c;
        float value = 0.0f;
        if (row < folded_height && column < folded_width)
            value = to_float(folded[((size_t)(n * folded_height + row) * folded_width + column) * own + channel]);
        plain[i] = Rounded<Out>::one(accumulate ? to_float(plain[i]) + value : value);
    }
}

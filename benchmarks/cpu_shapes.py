"""Convolution, pooling and LRN on the CPU over a grid of shapes: caffepy's time beside PyTorch's.

    python benchmarks/cpu_shapes.py [--torch /path/to/python] [--threads 2] [--rounds 3] [--limit 1.2] [--avx2] [name]

Each layer of the grid (`shape_cases.py`) is run forward, for the gradient of its bottom and for that of its weights,
each by itself. caffepy runs its layers; PyTorch runs the same shapes in a process of its own, by another interpreter if
PyTorch is not installed beside caffepy, both in its plain layout and channels last, of which the faster counts. The two
sides take turns; a figure is the median over the rounds of each round's median, a ratio the median of the rounds'
ratios. Names are matched by their beginnings. `--avx2` keeps both sides to vectors of eight. At the end the rows above
`--limit` are named, the worst first.

Two cores of an AMD EPYC (Zen 4), a virtual machine, times of the processor with one thread; PyTorch 2.13. Whole runs of
162 layers, 441 ratios, one round each, both widths at the same time, hours apart:

                                 AVX-512 before    AVX-512    AVX2 before    AVX2
    median                       0.79              0.71       0.81           0.78
    worst                        1.69              1.45       1.88           2.62
    above 2 / 1.5 / 1.2          0 / 7 / 26        0 / 0 / 17 0 / 7 / 41     1 / 6 / 38

A later version, one round, while the host took a tenth to a sixth from both sides: medians 0.76 and 0.77 of 453 ratios,
30 and 36 above 1.2, most of them others than in the run before and in turns with its commit. Least times of five rounds
in turns with PyTorch: above 1.2 with AVX-512 were transposed depthwise 64x64/32 and 16x16/8 for the bottom (1.65,
1.22), depthwise 64/2, 112 forward (1.3), group 32 of 16 with stride 2 for the weights (1.37), over one axis group 4
with stride 2 for the weights (1.23); with AVX2 depthwise 64/2, 112 forward (1.6), depthwise dilated forward (1.45),
11x1 for the weights (1.36), first 80/4 over one axis (1.37) and group 32 of 8 with stride 2 (1.30) for the weights.
Above in some runs only: group 4 over three axes (1.08 to 1.45).

Two cores of an AMD EPYC (Zen 5, whole vectors of 16 in one step), one thread, alone on the machine. One round of all
453 ratios: medians 0.66 with AVX-512 and 0.75 with AVX2 (before the last changes 0.68 and 0.75), 20 and 18 above 1.2,
most of these below 1.3. Measured again by three rounds, or by earlier runs of three, stay above 1.2 with AVX-512

    data: transposed depthwise 16x16/8, of one channel, 64x64/32   1.52 to 1.81, 1.44, 1.22 to 1.58
    weights: group 8 of 12 3x3; group 4 of 24 3x3                  1.21 to 1.41, 1.23
    data: whole image 7x7                                          1.22 to 1.37, 26 MB of weights from memory
    forward, data: 3-d dilated                                     1.26, 1.26
    weights: 1-d 256, 100, batch 1                                 1.19 to 1.26

and with AVX2

    weights: depthwise multiplier 8, 32                            1.49 to 1.71, 1.54 (1.46, 1.08 before)
    data: transposed depthwise 16x16/8                             1.41 to 1.54
    weights: depthwise 11x1; 512, 14                               1.41, 1.28 to 1.33
    forward: maximum over 2048, 64                                 1.29 to 1.68, 26 MB from memory (0.48 on Zen 4)
    data: 3x3 512, 7, batch 1                                      1.38
    weights: group 8 of 32 to 4; data: 3-d group 4                 1.25, 1.25

In one round alone, noise: with AVX-512 depthwise 960, 7 for the weights (1.53; 0.86 by three rounds), depthwise 32, 112
forward (1.50; 0.80), 3x3 16, 512 and 3x3 3 to 64 of one image, 1x1 1 to 64 (1.2 to 1.85; 0.93 to 1.2), group 2 of 48;
with AVX2 depthwise 960, 7 (1.45; 1.11), group 32 of 16 3x3/2, average global.

Depthwise rows, forward, data, weights by three rounds, before and now, AVX-512: 64/2, 112 1.65 1.22 1.24, now 0.86 0.36
1.08; 32, 112 1.30 0.91 0.76, now 0.80 0.62 0.65. AVX2: 32, 112 forward 1.58, now 1.02 to 1.16; dilated 1.47, now 1.10;
5x5/2 240 data 1.35, now 0.50 to 1.24.

The gradient of the weights in turns with the commit before, least times of three rounds in ms, AVX-512:

    group 32 of 16 3x3, 14; stride 2, 28           1.61 2.51      1.13 1.71
    transposed group 4; group 8 of 32 to 4         1.40 0.74      0.97 0.56
    1-d group 4, stride 2; group 8 of 12 3x3       1.40 1.13      1.11 0.93
    3x3 16, 512; dense 3x3 64, 128/2               8.7 5.7 9.1    7.0 5.5 8.8
    AVX2: group 32 of 8 3x3/2                      6.19           3.63

and the others with AVX2 0.95 to 1.05 of the time before (0.87 once, of times that vary by 1.6).

What the last change was, and what did not help:

- A tile of twelve rows has twelve addresses, more than there are registers for: a step of one vector read about 15
  words again, beside its 13 numbers. Where rows lie together in fours, three addresses do: 0.79 to 0.86 of the time
  (1.0 over one axis). Of two vectors, whose products take longer than the addresses, this was slower (1.03 to 1.08).
- Sixteen rows are a pixel's channels and need four addresses: 0.75 to 1.0 of the twelve rows' time with multiples of
  16 channels, but 1.27 with 12, so the rows of a kernel's column decide. With AVX2 twelve rows in fours were not faster
  (0.9 to 1.24), and eight stay.
- One vector instead of two where a kernel's column has 16 rows, of which twelve leave a third of the second tile empty.
- Eight channels share a line of the caches with the next group: images that the second cache does not hold are passed
  over in parts, all groups of a part (AVX2, group 32 of 8, stride 2). With 16 channels and more, which
  fill lines, it was slower (1.0 to 1.3, with 32 1.4 to 1.6), as sums are read and written for each part.
- Tried for the gradient of the weights in groups and of no use: groups brought together whatever their channels (1.0 to
  1.2), more or fewer pixels at a time (0.85 to 1.6, none better throughout).
- Depthwise 64/2, 112 forward streams 32 MB, which takes 0.4 ms, and waited for the third cache in 1.5 ms. What the
  next tile, the next vectors or the next row are the first to read is fetched 256 bytes of channels ahead, in the new
  rows alone: 1.50 to 0.75 ms (AVX2 1.8 to 1.2). A whole row ahead (1.1), and one vector ahead (1.0), were slower.
- With AVX2 instructions set the speed: ten columns' offsets and some of the sums were kept in memory. Computed where
  they are used: depthwise 32, 112 forward 1.4 to 1.2, dilated 0.28 to 0.23 ms. Tiles of 4 to 7 pixels instead: no
  better throughout (0.8 to 1.2). Edges as fast as the inside would save 5 (dilated) to 18 hundredths (5x5/2): not done.
- Groups with a stride and AVX-512 stay with pixel after pixel, as rows were slower (group 32 of 8, 3x3/2: 2.1 to 2.7).
- Gradients of weights fetched one of two new rows with a stride, and nothing at the end of a line: 64/2 1.2 to 0.94,
  32, 112 0.84 to 0.74; AVX2 dilated 0.36 to 0.29, over three axes 0.73 to 0.62, 64/2 no faster. With AVX2 windows of
  5x5, a row of taps at a time, were slower so (1.13 to 1.2) and stay as they were.
- All phases of a row side by side pay here for images that no cache holds as well: 64/2 data 2.0 to 1.35 ms (AVX2 2.2
  to 1.7), of 32 images 8.6 to 7.2 (9.1 to 7.6), 5x5/2 of 16 images 0.92 to 0.47.
- With a multiplier x and dy have lines of the caches of their own, and what is fetched is as it was. With addresses
  computed where they are used multipliers 2 and 3 take 0.82 to 0.9 of the time, 8 with AVX-512 0.82; with AVX2 8 and 32
  take 1.25 and 1.4, and not because of the addresses or of what is fetched: three ways gave the same.
- A maximum over 2048 channels with AVX2: one, two, three, four and sixteen columns at a time in place of eight. One
  column took 0.73 of the time where images come from memory and 1.2 where a cache holds them: left, as Zen 4 had 0.48.
- Products of few rows with a factor of 26 to 150 MB: eight of its rows side by side (sixteen for more than eight rows)
  in place of 32 took 0.79 to 1.05 of the time with AVX-512 and 0.62 to 0.9 with AVX2, as memory is then read in order;
  1.1 to 1.7 where a cache holds the factor. 256 rows: 0.9 to 1.5.
- Not tried on this processor: whole-plane and transposed depthwise rows.

What the changes before gained, times in ms in turns with the commit before, or ratios of runs before and after:

    weights: 5x5 3 to 32, 32 to 32, 32 to 64 of CIFAR-10's quick net     7.2, 14, 6.5    5.6, 11, 4.8
    weights: dilated by 6; 1x1 2048 to 512; 1x7, padded                  21, 86, 5.5     15, 71, 5.0
    forward, data, weights: 1x1 from one channel to 64                   0.29 0.71 0.34  0.13 0.13 0.13

    forward, data, weights     before           after            AVX2 before      after
    maximum over 2048, 64      2.62 0.53        1.13 0.38        3.05 0.33        0.48 0.36
    average 2x2/2, 3 channels  0.57 1.59        0.25 0.14        0.78 2.77        0.31 0.15
    average over 1024, batch 8 1.66 0.94        0.98 0.47        2.10 0.77        0.88 0.50
    LRN within, one channel    1.79 0.60        0.34 0.29        1.96 0.55        0.26 0.25
    depthwise 3, 224           1.83 0.88 0.59   0.64 0.35 0.56   2.43 2.12 0.60   0.56 0.36 0.45
    depthwise 31x31            2.10 1.21 0.06   0.86 0.54 0.05   1.19 1.53 0.08   0.64 0.78 0.09
    depthwise whole image      0.68 1.58 0.12   0.58 0.92 0.10   0.86 2.69 0.32   0.58 0.57 0.26
    multiplier 8, weights      0.45             0.39             2.65             0.51

In turns with the commit before, least times of six rounds:

                                             before         after          AVX2 before    after
    depthwise 960, 7, 64: forward, data      2.07 1.91      1.10 1.30      2.43 2.40      2.10 1.98
    depthwise 512, 14: forward, data         0.47 0.39      0.39 0.40      0.58 0.74      0.58 0.43
    transposed group 4, data                 3.90           2.40           2.24           2.15
    group 32 of 16 3x3/2, 28, forward        3.57           2.77           3.24           2.80
    group 8 of 30 1x1: forward, data         2.83 3.64      2.84 2.89      3.16 2.87      1.67 1.57
    group 8 of 32 1x1: forward, data         3.68 3.42      2.38 2.35      3.48 3.26      2.08 2.07
    1-d 1x1 64, dilated 512, weights         3.94 4.81      3.01 3.15      5.66 5.78      3.60 2.98

Of dense convolutions, pooling and LRN over two axes most ratios above 1.2 in such runs are noise: alone on the machine,
with 3 rounds, one output 3x3 for the bottom (2.57) had 1.00, patches 4x4/4 (1.56, 1.48) 0.93 and 1.12, maximum over
2048 of 64 images (1.56) 0.6 to 1.2, 1x1 2048 to 512 for the weights (AVX2, 1.48) 1.17, 2x2/3 for the bottom (1.54)
0.67 to 0.78. Only 3x1/2 forward was above in every run (1.25 to 1.44; now 1.0 to 1.15). Between 1.1 and 1.3 stay: 1x1
256, 14 of one image forward, whose packing and turning are a good part of 1.2 ms, first 3x3/2 of one image for the
weights (0.33 ms), and with AVX2 the gradient of 64 to 3 or 1 (1.1 to 1.3, 1.7 once) and transposed 2x2/2 128 to 64.

What was learnt before, last first:

- Rows of 7, 14 and 21 pixels are whole tiles of seven: of eight, the last one lay over the one before.
- With a stride a window's neighbours do not read several of its taps, not only the last: all of these are fetched ahead
  for the next tile of a group.
- Single pixels in groups are read block by block, all groups of a block, as larger windows are: one group after the
  other read an image that the second cache does not hold.
- AVX2's stores with a mask are slow: a half, a quarter and an eighth of a vector, as many as are wanted, took half of
  the time of groups of 30.
- The gradient of the weights of one or two taps over one axis is a product for each tap, of images as they lie, that
  are not turned. Of three taps it was slower (1.07 to 1.1). Forward and for the bottom such products took 0.65 to 1.8
  of the time.
- Tried for the gradient of bilinear deconvolution (depthwise 64x64/32, 16x16/8 with 21 channels), and slower: runs of
  a window's row that fill vectors whatever the channels, summed in the first cache (1.0 to 1.4) or in registers.
- Depthwise 64/2, 112 forward: what the next row is the first to read fetched ahead a whole row before took 0.83 to
  0.92 of the time of the same loop without (2.4 ms; 3.9 with AVX2), but no less than what is there with AVX2.
- The padded copy of an image is a tenth of the time of a convolution of 32 to 64 channels, even without groups. Read
  where it lies, with rows of the kernel as runs and pixels sorted by the taps that they meet, passes took, in turns
  with the commit before (AVX-512): 3x1/2 11.6 to 9.5 ms, 3x3 16, 512 12.9 to 11.1, dilated by 6 14.5 to 12.8, 3x3/2
  128 18.4 to 17.2, first 7x7/2 20.4 to 18.3, 3x3/2 32 to 64, 112 11.3 to 9.7; with AVX2 first 3x3/2 0.30 to 0.27. The
  order of a sum stays. Large windows on small images leave tiles half empty (15x15: 1.29 of the time, 5x5 on 28x28
  pixels for the bottom: 1.03), so these keep the copy.
- Groups of 8 to 64 channels have little to multiply for each element: padded copies, one group after the other, took a
  sixth to a half of the time. Read where they lie, lines of a group's pixels are in flight while the tile before is
  summed. Pixels are sorted by the taps that they meet inside the image, so that no tile needs zeros. What the next
  tile is the first to read is fetched ahead, which took another tenth (group 32 of 16, stride 2: 4.8, 5.4 and 4.9 ms
  became 2.9, 3.1 and 3.9). Fetched in bursts, between one group's tiles and the next one's, it got slower.
- The gradient of weights reads a group's pixels for each tile of twelve elements. Vectors of eight halve the time of a
  tile, so that the second cache sets the speed where pixels are 1 KiB and more apart: there a group's pixels are
  brought together first (group 32 of 8, stride 2: 0.73). With AVX-512 and 16 channels that was slower (1.15).
- All phases of a strided gradient are classes of pixels of one pass: packed once, written once. With windows smaller
  than the stride, most pixels meet no tap (2x2/3: 2.1 to 1.1 ms).
- A last vector of up to eight lanes costs half with half a vector: 256 bits go two at a time (32 to 4: 0.56, one output
  3x3: 0.68, 24 outputs: 0.82). It shares the packed order, so only the tile chooses.
- Weights packed in the order in which they lie, not panel by panel: 2.6 to 0.7 ms (3x3 512, 9 MiB, batch 1).
- Depthwise layers over one axis need no channels last: a line is copied with zeros around it, in the phases of the
  stride, and each tap reads vectors along it (7 taps, 128 channels of 1000: 0.24 to 0.5 of the time; 32 of 30000: 0.16
  to 0.33; one channel to 16 or 64, up to 9 taps: 0.16 to 0.5). Lines of fewer than four vectors were slower so.
- The gradient of a depthwise image with stride read 17 vectors for 7 products. All phases of a row in one pass, weights
  in registers and eight pixels at a time, a tile of each phase after the other: 0.5 to 0.7 of the time, with 31x31
  windows 0.44. Where no cache holds the image it took 1.2 to 1.7 times as long, as a row is not written in order; made
  in a cache first and then copied it was no faster than runs of pixels, which stay for these and for strides above 4.
- Of 512 or 1024 channels, windows of 25 and more elements read pixels that share a few sets of the first cache: brought
  together, a vector of channels after the other, 0.5 to 0.7 of the time, for a batch of 32 too. It did not pay for
  other numbers of channels (0.93 to 1.65), nor for 3x3 (0.7 to 1.6). For 512 channels and stride 2 (28x28) all phases
  in one pass took 1.5 times as long, for the same reason.
- A last vector of channels that lies over the one before needs no mask there either (30 channels, AVX2: 0.79 to 0.55).
- With AVX2 eight pixels of a stride of two share what they read as well (3x3/2: 0.42 to 0.79 of the time); with AVX-512
  this pays for images that are cached (0.81 and 0.86), not for 112x112 pixels (1.16 and 1.22).
- Lines and columns of the output at which the elements of a tile lie beside the image are left out of the gradient of
  the weights: 5x5 windows on 8x8 pixels have 28 % of them.
- Tiles of 24 sums (AVX-512) read packed factors half as often and help that gradient. Forward they were slower (7x7/2
  by a tenth): twelve pixels lie far apart. Winograd's products were slower with them as well.
- With 24 sums, sums of sums spill from the registers: only runs of 128 elements and more have their own.
- Lines of a group's channels are read in another order than memory's when they are copied; fetched ahead line by line
  they take half the time. Fetching ahead where results go was slower.
- Pixels of 1024 channels are 4 KiB apart: each is in a page of its own, and all of them in the same sets of the first
  cache. One vector of channels after the other, nothing is fetched ahead, so the time depends on which cache holds the
  image (1.2 to 3.9 of PyTorch's for the same average over the plane; that this is the cause was not traced). Passing
  over the columns of one row of the window with all their channels, sums and maxima kept in y, reads memory in order:
  0.4 of the time for a batch of 64. A fifth of the rest, 8 of 38 microseconds, was Python that looked up tables: what
  an average is called with is now planned once.
- Averages of one to four channels: rows are added up in whole vectors, then the few columns of each element by a table.
  Rows of a gradient that meet the same windows as the row before are copied (2x2/2, 3 channels: 3.0 to 0.33 ms).
- Tails of channels: a last vector that lies over the one before needs no mask (33 channels, with the rows
  that are copied: 0.39 to 0.19 ms). Offsets that are not constants in the innermost loop took up to twice the time.
- Rows of more than 24 taps (6 with AVX2) took the way for single pixels at the edges, which for 31x31 are half of all,
  each a chain of dependent sums. The way of eight pixels with weights that do not fit in registers is 2.5 times faster.
- Depthwise rows forward: the next vector's pixels fetched ahead, as in the gradient of the weights (960, 7: 0.65).
- Depthwise layers of a few channels without a stride: rows of elements, padded, with the weights repeated (3, 224: half
  of the time, with AVX2 0.28).
- Weights of 32 outputs a channel: channels repeated make it a depthwise layer (8.4 to 6.0 ms; 8 with AVX2: 5.8 to 2.4).
- Groups of 16, 24 or 32 channels: a group's pixels lie 2 or 4 KiB apart, in two sets of the first cache or one. The
  padded copy, which is made anyway, now holds one group after the other: rows of the kernel are runs that lie together,
  and zeros at the edges are left out of them (group 32 of 32, 7x7: 2.65, 2.72 and 4.38 ms became 2.17, 2.32 and 2.76).
- The gradient of weights passed over each image by itself. Small images are shorter than a pass should be, and the sums
  were read and written for each: it passes over the lines of all images as if they were one.
- Taps that no window meets inside the image are left out: a volume of one layer and padding has 18 of 27 of them
  (3-d 512, 1, 4: 1.07, 0.85 and 1.72 ms became 0.48, 0.50 and 0.58), wide dilations on small images all but one.
- A depthwise layer with eight outputs a channel left twelve of sixteen lanes empty in the gradient of its image. That
  of each output apart, eight times the memory, then added up, takes a third of the time.
- The gradient of a depthwise layer with stride, which is bilinear deconvolution's forward pass, wrote the image in
  strips, one phase of the stride after the other. A pixel repeated `stride` times meets the weights in runs that fill
  vectors whatever the channels, and a row is written once (64x64/32, 21 channels: 13.3 to 2.1 ms; 64/2, 112: 4.7 to
  2.9). Where the phases stay, they pass over a few images at a time (2x2/2: 11.5 to 9.9 ms).
- Eight channels in a group: rows of three taps with their 24 vectors of weights, more than registers hold, still share
  what they read, as weights spilled to the stack cost no more than reading them (3-d group 4: 2.9 to 1.8 ms).
- Averages of up to nine elements are faster summed in registers than by lines (2x2/2: 0.45 to 0.12 ms).
- Bringing the pixels of a vector of channels together (512, 14: 0.43 to 0.38 ms; 1024, 7: 0.09 to 0.05) does not pay
  for a batch that caches do not hold: memory is fetched ahead only for lines that follow each other.
- Fetching ahead by software did not help maximum pooling of 2048 channels (7x7, batch 64), whose pixels are 8 KiB
  apart: PyTorch reads pixel after pixel and keeps the maxima in memory.

And before:

- A pixel of a depthwise row meets three taps: eight pixels read ten columns instead of 24. With stride two they read
  17 of 24, which did not pay forward (1.14 of the time). For groups of four channels the gradient of the weights got
  slower so (1.09 and 1.18), as each product of a shuffle was there before: it keeps the loop over single columns.
- Rows of 512 channels: the next vector's lines fetched ahead (software prefetch) took the gradient of the weights from
  0.65-0.71 to 0.61 of the time before (0.91 to 0.69 with 32 channels).
- Passes of a strided gradient over the whole batch read it from memory once a phase; a few images at a time: 0.71.
- Exchanging axes costs memory, not instructions: in squares of 64 by 64, and a part of the batch at a time so that
  both orders stay in the second cache, it took half the time (1-d depthwise 0.66 in all).
- One or three channels fill a fifth of a vector. The columns of the kernel beside them fill it, and the products are
  added up in a second pass: 0.07 to 0.58 of the time for gradients of first layers.
- Maxima of four vectors at once: neighbouring lines of memory, and four chains of comparisons instead of one.
- Convolutions over one and three axes were NumPy's im2col. All spatial axes but the last taken as one, they are the
  same tables of taps and windows as two axes have. What is left of their ratio is the way to channels last and back:
  1-d depthwise took 15.6 ms with loops for it, 6.5 with squares turned in registers.
- A group of four channels uses a quarter of a vector. Several groups in one vector cost a shuffle for each product and
  save three of four; depthwise is the case without a shuffle, eight pixels at a time in registers.
- Masked loads are as good as plain ones with AVX-512, but not with AVX2: depthwise 32, 112 went from 4.3 to 2.4 ms.
- Weights are packed once a pass. For few windows that is most of the work: products then read the weights where they
  lie. Where weights are packed against their order, squares turned in registers halve the time (3x3 512, batch 1).
- Average pooling is a sum over rows, then over columns: 13x13 windows take 0.2 of PyTorch's time.

oneDNN by ctypes (the wheel onednn-cpu-gomp 2023.2, oneDNN 3.2, shares GNU's OpenMP with numba; the newer wheel `onednn`
needs SYCL and TBB), both in the same process, plain weights brought to its order each time; its time and ours in ms:

                                 AVX-512: forward, data, weights          AVX2
    3x3 64, 56, batch 8          17/18  17/19  22/22                      22/24  22/24  47/29
    3x3 256, 14, batch 8         18/18  17/17  20/27                      21/21  19/24  34/37
    1x1 512, 14, batch 16        20/17  16/18  18/22                      18/23  19/23  26/31
    depthwise 32, 112            2.5/3.7  3.0/3.0  2.9/3.5                2.7/4.5  2.7/4.2  7.3/4.7
    depthwise 512, 14            0.38/0.56  0.46/0.72  0.50/1.24          1.1/1.7  0.94/1.7  1.9/2.4
    group 32 of 4 3x3            10/5.4  7.3/7.1  15/4.2                  28/12  17/10  29/6.4
    depthwise dilated            0.40/0.81  5.3/0.51  5.1/0.64            0.78/2.0  7.4/1.7  16/1.3
    large 15x15                  12/13  12/13  5607/18

It wins with depthwise layers, is nearly even with dense ones, and has cliffs of its own. What is left of ours: rows of
512 channels lie 2 KiB apart, so that the pixels of a row fall into two sets of the first cache, and the gradient of
depthwise weights passes over each row once for every column of the kernel.

Two threads on the same machine, when it was less busy (3 rounds): depthwise 512, 14 at 1.06, 0.98 and 1.71 of PyTorch's
time, depthwise 1024, 7, batch 1 at 0.88, 0.61 and 1.85. A second thread for work of ten microseconds made the latter
ten times slower on a busy machine, so the least work of a thread is four times as much.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from peers.torch_shapes import Passes, torch_passes
from processes import narrow_vectors
from shape_cases import CASES, Case, layer_text

ROOT = Path(__file__).resolve().parent.parent
GROUP_SECONDS = 0.02
GROUPS = 3


# -- caffepy --------------------------------------------------------------------------------------------------


def caffepy_passes(case: Case, threads: int) -> Passes:
    """The passes of caffepy's layer."""
    import numpy as np
    from google.protobuf import text_format

    from caffepy.backend import create_backend
    from caffepy.layers.core.base import LayerContext
    from caffepy.net import Net
    from caffepy.proto import caffe_pb2

    shape = " ".join(f"dim: {size}" for size in case.x)
    text = f'force_backward: true layer {{ name: "x" type: "Input" top: "x" input_param {{ shape {{ {shape} }} }} }}'
    text += f'layer {{ name: "y" bottom: "x" top: "y" {layer_text(case)} }}'
    backend = create_backend(None, threads)
    net = Net(text_format.Parse(text, caffe_pb2.NetParameter()), LayerContext(backend, caffe_pb2.TRAIN, 1))
    layer, (x, y) = net.layers[-1], (net.blobs["x"], net.blobs["y"])
    random = np.random.default_rng(0)
    backend.from_host(random.standard_normal(x.shape, dtype=np.float32), x.data)
    layer.forward([x], [y])
    backend.from_host(random.standard_normal(y.shape, dtype=np.float32), y.diff)

    def backward(down: bool) -> None:
        layer.propagate_to_params = [not down] * len(layer.blobs)
        layer.backward([y], [down], [x])

    passes: Passes = {"forward": lambda: layer.forward([x], [y]), "data": lambda: backward(True)}
    return {**passes, "weights": lambda: backward(False)} if layer.blobs else passes


# -- the comparison -------------------------------------------------------------------------------------------


def serve(threads: int) -> None:
    """Answer each case number on a line of the input with PyTorch's times."""
    import torch

    torch.set_num_threads(threads)
    for line in sys.stdin:
        case = CASES[int(line)]
        kinds = (False,) if len(case.x) == 3 else (False, True)
        layouts = [measure(torch_passes(case, last), threads) for last in kinds]
        print(json.dumps({name: min(times[name] for times in layouts) for name in layouts[0]}), flush=True)


def measure(passes: Passes, threads: int) -> dict[str, float]:
    """Milliseconds of each pass, the median of several groups."""
    # With one thread it is the processor's time, which other programs disturb less; several spin while they wait.
    clock = time.process_time if threads == 1 else time.perf_counter
    return {name: 1000 * _median_seconds(run, clock) for name, run in passes.items()}


def _median_seconds(run: Callable[[], Any], clock: Callable[[], float]) -> float:
    run()
    start = clock()
    run()
    count = max(1, min(200, int(GROUP_SECONDS / max(1e-6, clock() - start))))
    times = []
    for _ in range(GROUPS):
        start = clock()
        for _ in range(count):
            run()
        times.append((clock() - start) / count)
    return statistics.median(times)


@contextmanager
def peer(interpreter: str, threads: int) -> Iterator[Callable[[int], dict[str, float]]]:
    """A process that measures PyTorch: asks it for the times of a case."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    environment.pop("PYTHONPATH", None)
    command = [interpreter, str(Path(__file__).resolve()), "--serve", "--threads", str(threads)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
    with subprocess.Popen(command, env=environment, **pipes) as process:
        assert process.stdin is not None and process.stdout is not None
        requests, replies = process.stdin, process.stdout

        def ask(number: int) -> dict[str, float]:
            requests.write(f"{number}\n")
            requests.flush()
            line = replies.readline()
            if not line:
                raise SystemExit(f"{interpreter} cannot measure '{CASES[number].name}': has it PyTorch?")
            result: dict[str, float] = json.loads(line)
            return result

        try:
            yield ask
        finally:
            requests.close()


def compare(number: int, ask: Callable[[int], dict[str, float]], options: argparse.Namespace) -> dict[str, float]:
    """Print a case's row; the ratio of each of its passes."""
    case = CASES[number]
    passes = caffepy_passes(case, options.threads)
    rounds = [(measure(passes, options.threads), ask(number)) for _ in range(options.rounds)]
    ratios, columns = {}, []
    for name in passes:
        ours, theirs = (statistics.median(sides[i][name] for sides in rounds) for i in (0, 1))
        ratios[name] = statistics.median(a[name] / b[name] for a, b in rounds)
        columns.append(f"{ours:9.3f} {theirs:9.3f} {ratios[name]:6.2f}")
    print(f"{case.name:30}" + " |".join(columns), flush=True)
    return ratios


def report(table: dict[str, dict[str, float]], limit: float) -> None:
    """Name the rows above the limit, the worst first."""
    ratios = {f"{name}, {kind}": ratio for name, row in table.items() for kind, ratio in row.items()}
    worst = sorted(ratios, key=lambda name: -ratios[name])
    print(f"\nmedian of {len(ratios)} ratios {statistics.median(ratios.values()):.2f}; above {limit}, the worst first:")
    for name in [name for name in worst if ratios[name] > limit] or worst[:1]:
        print(f"{ratios[name]:7.2f}  {name}")


def main() -> None:
    """Read the command line and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="beginnings of the rows' names; all by default")
    parser.add_argument("--torch", default=sys.executable, help="the interpreter that has PyTorch")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=float, default=1.2)
    parser.add_argument(
        "--avx2", action="store_true", help="vectors of eight on both sides, whatever the processor has"
    )
    parser.add_argument("--serve", action="store_true", help="be the peer")
    options = parser.parse_args()
    if options.avx2:
        narrow_vectors()
    if options.serve:
        serve(options.threads)
        return
    sys.path.insert(0, str(ROOT))
    title = f"{'caffepy':>9} {'PyTorch':>9} {'ratio':>6}"
    print(" " * 30 + "milliseconds forward, for the gradient of the bottom, for that of the weights")
    print(" " * 30 + " |".join([title] * 3))
    table = {}
    with peer(options.torch, options.threads) as ask:
        for number, case in enumerate(CASES):
            if not options.names or case.name.startswith(tuple(options.names)):
                table[case.name] = compare(number, ask, options)
    report(table, options.limit)


if __name__ == "__main__":
    main()

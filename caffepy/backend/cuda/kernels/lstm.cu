// The gates of an LSTM at one time step: one thread for each element of the hidden state.

// Exact at both ends, where exp overflows or vanishes.
__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// What of the cell before is there: nothing at the beginning of a sequence, even if it is not finite.
__device__ __forceinline__ float continued(float value, float cont) { return cont == 0.0f ? 0.0f : value * cont; }

extern "C" __global__ void lstm_forward(float *gates, const float *cell_before, const float *cont, float *cell,
                                        float *hidden, unsigned int size, unsigned int count) {
    EACH_INDEX(index, count) {
        const unsigned int n = index / size;
        const size_t first = (size_t)n * 3 * size + index, second = first + size, third = second + size;
        const size_t fourth = third + size;
        const float i = sigmoid(gates[first]), f = sigmoid(gates[second]), o = sigmoid(gates[third]);
        const float g = tanhf(gates[fourth]);
        const float value = continued(f * cell_before[index], cont[n]) + i * g;
        gates[first] = i;
        gates[second] = f;
        gates[third] = o;
        gates[fourth] = g;
        cell[index] = value;
        hidden[index] = o * tanhf(value);
    }
}

extern "C" __global__ void lstm_backward(float *gates, const float *cell_before, const float *cont, const float *cell,
                                         float *d_cell, const float *d_hidden, unsigned int size, unsigned int count) {
    EACH_INDEX(index, count) {
        const unsigned int n = index / size;
        const size_t first = (size_t)n * 3 * size + index, second = first + size, third = second + size;
        const size_t fourth = third + size;
        const float i = gates[first], f = gates[second], o = gates[third], g = gates[fourth];
        const float rounded = tanhf(cell[index]), dh = d_hidden[index];
        const float dc = d_cell[index] + dh * o * (1.0f - rounded * rounded);
        gates[first] = dc * g * i * (1.0f - i);
        gates[second] = dc * continued(cell_before[index], cont[n]) * f * (1.0f - f);
        gates[third] = dh * rounded * o * (1.0f - o);
        gates[fourth] = dc * i * (1.0f - g * g);
        d_cell[index] = dc * f * cont[n];
    }
}

// The gates of an LSTM at one time step: one thread for each element of the hidden state. The text before defines Element, the
// dtype of the layer's blobs; cells and gates are float32.

// Exact at both ends, where exp overflows or vanishes.
__device__ __forceinline__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// What of the cell before is there: nothing at the beginning of a sequence, even if it is not finite.
__device__ __forceinline__ float continued(float value, float cont) { return cont == 0.0f ? 0.0f : value * cont; }

// Where the first of an element's four gates lies; the others follow, `size` apart.
__device__ __forceinline__ size_t first_gate(unsigned int index, unsigned int n, unsigned int size) {
    return (size_t)n * 3 * size + index;
}

// Turns the inputs of an element's gates into the gates; returns the hidden state.
__device__ __forceinline__ float unit_forward(float *gates, unsigned int size, float before, float cont, float *cell) {
    const float i = sigmoid(gates[0]), f = sigmoid(gates[size]), o = sigmoid(gates[2 * size]), g = tanhf(gates[3 * size]);
    const float value = continued(f * before, cont) + i * g;
    gates[0] = i;
    gates[size] = f;
    gates[2 * size] = o;
    gates[3 * size] = g;
    *cell = value;
    return o * tanhf(value);
}

// The gradients by the inputs of an element's gates; `d_cell` becomes that by the cell before.
template <typename T>
__device__ __forceinline__ void unit_backward(const float *gates, T *d_gates, unsigned int size, float before, float cont,
                                              float cell, float *d_cell, float dh) {
    const float i = gates[0], f = gates[size], o = gates[2 * size], g = gates[3 * size];
    const float rounded = tanhf(cell), dc = *d_cell + dh * o * (1.0f - rounded * rounded);
    d_gates[0] = Rounded<T>::one(dc * g * i * (1.0f - i));
    d_gates[size] = Rounded<T>::one(dc * continued(before, cont) * f * (1.0f - f));
    d_gates[2 * size] = Rounded<T>::one(dh * rounded * o * (1.0f - o));
    d_gates[3 * size] = Rounded<T>::one(dc * i * (1.0f - g * g));
    *d_cell = dc * f * cont;
}

extern "C" __global__ void lstm_forward(float *gates, const float *cell_before, const float *cont, float *cell,
                                        float *hidden, unsigned int size, unsigned int count) {
    EACH_INDEX(index, count) {
        const unsigned int n = index / size;
        hidden[index] =
            unit_forward(gates + first_gate(index, n, size), size, cell_before[index], cont[n], cell + index);
    }
}

extern "C" __global__ void lstm_backward(float *gates, const float *cell_before, const float *cont, const float *cell,
                                         float *d_cell, const float *d_hidden, unsigned int size, unsigned int count) {
    EACH_INDEX(index, count) {
        const unsigned int n = index / size;
        float *own = gates + first_gate(index, n, size);
        unit_backward(own, own, size, cell_before[index], cont[n], cell[index], d_cell + index, d_hidden[index]);
    }
}

// As lstm_forward; `carried` gets what the next step's product takes of the hidden state, if the loop goes on.
extern "C" __global__ void lstm_step_forward(float *gates, const float *cell_before, const float *cont, float *cell,
                                             const float *next_cont, Element *hidden, Element *carried,
                                             unsigned int size, unsigned int count, int goes_on) {
    EACH_INDEX(index, count) {
        const unsigned int n = index / size;
        const float value =
            unit_forward(gates + first_gate(index, n, size), size, cell_before[index], cont[n], cell + index);
        hidden[index] = Rounded<Element>::one(value);
        if (goes_on) carried[index] = Rounded<Element>::one(value * next_cont[n]);
    }
}

// As lstm_backward, given the gradients by the top and, if the loop goes on, by what the next step's product took.
extern "C" __global__ void lstm_step_backward(const float *gates, const float *cell_before, const float *cont,
                                              const float *cell, float *d_cell, const float *next_cont,
                                              const float *d_carried, const Element *dy, Element *d_gates,
                                              unsigned int size, unsigned int count, int goes_on) {
    EACH_INDEX(index, count) {
        const unsigned int n = index / size;
        const size_t own = first_gate(index, n, size);
        const float dh = to_float(dy[index]) + (goes_on ? d_carried[index] * next_cont[n] : 0.0f);
        unit_backward(gates + own, d_gates + own, size, cell_before[index], cont[n], cell[index], d_cell + index, dh);
    }
}

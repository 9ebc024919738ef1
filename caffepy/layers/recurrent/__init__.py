"""Layers that run over time steps: RNN, LSTM and the LSTM's unit. Found by name."""

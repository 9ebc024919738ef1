"""Recurrent layers: RNN, LSTM and LSTMUnit."""

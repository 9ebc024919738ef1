"""Convolution algorithms of the GPU and the choice among them. cuda imports it."""

"""Matrix products on the GPU. cuda and cuda/convolution import it."""

"""The backend of one GPU, on CuPy and cuDNN. Only `caffepy.backend` imports it; training, distributed and cli
import `cuda/device`."""

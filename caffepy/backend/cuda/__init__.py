"""The backend of one GPU, on CuPy and cuDNN. Only `caffepy.backend` imports it; cli and parallel/hardware import
`cuda/device`."""

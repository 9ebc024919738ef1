"""One GPU's backend, on CuPy and cuDNN. Only `caffepy.backend` imports it; cli and parallel/hardware import
`cuda/device`.
"""

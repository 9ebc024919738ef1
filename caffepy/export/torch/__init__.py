"""Export to PyTorch: `write` gives the text and the parameters of a module, `check` compares it with the net.

One function a layer type. Only `modules`, whose classes are copied into the text, and `check` import torch.
"""

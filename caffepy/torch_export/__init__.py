"""Export of nets to PyTorch: `write` gives the text and the parameters of a module, `check` compares it with the net.

One function a layer type, registered where it is defined. cli imports it. Only `modules`, whose classes are copied into
the text, and `check` import torch.
"""

"""Export to PyTorch: `write` gives the text and the parameters of a module, and runs the module for checks.

`rules` has what layer types become in PyTorch alone. Only `modules`, whose classes are copied into the text, and
`write`, where it runs a module, import torch.
"""

"""What every layer is made of: the base class, buffers, logical order, labels. All other folders of layers, net and
solvers import it.
"""

"""Reading what users wrote: prototxt files of every age, upgraded and checked.

data and every part above import it.
"""

"""Reading what users wrote: prototxt and .caffemodel files of every age, upgraded and checked.

data and every part above import it.
"""

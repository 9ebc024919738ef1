"""A trained net at work: it is loaded once; images are prepared, classified and searched for objects.

Imported by training, cli and pycaffe.
"""

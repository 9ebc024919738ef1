"""Arrays that are only shapes: a backend that computes nothing, for planning memory. net may import it, through the
tests too.
"""

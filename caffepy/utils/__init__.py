"""What is not Caffe's: files, registry, caches, installation, clocks, log lines, options, os.fork.

All parts import them.
"""

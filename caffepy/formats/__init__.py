"""Caffe's files as messages and arrays: prototxt, schemas, .caffemodel, .solverstate, HDF5, safetensors.

Net and all higher layers import them.
"""

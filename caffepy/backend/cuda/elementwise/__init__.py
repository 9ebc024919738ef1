"""Formulas made into CUDA kernels, elementwise and reducing. cuda and its folders import it."""

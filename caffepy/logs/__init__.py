"""Log lines, traces and reports of a run, and reading of logs of BVLC Caffe, NVIDIA Caffe and caffepy.

All parts above the formats import it.
"""

"""The layers of SSD: prior boxes, loss, detections and evaluation, and the arithmetic of boxes.

Boxes are rows (xmin, ymin, xmax, ymax) of float32, as fractions of the image's width and height. Overlaps and scores
are computed exactly as in `bbox_util.cpp`, so that the same boxes are matched, mined and suppressed.
"""

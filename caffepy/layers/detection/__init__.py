"""The layers of SSD: prior boxes, their loss, detections and their score, and the arithmetic of boxes that they share.

Boxes are rows (xmin, ymin, xmax, ymax) of float32, as parts of the image's width and height. What is compared is
computed as `bbox_util.cpp` computes it, so that the same boxes are matched, kept and mined.

Found by name; onnx imports its boxes.
"""

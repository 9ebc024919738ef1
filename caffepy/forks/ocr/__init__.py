"""Nets that read text: CTPN, caffe_ocr and crnn.caffe."""

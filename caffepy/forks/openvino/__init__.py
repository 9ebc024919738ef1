"""Layers of the Caffe of OpenVINO's training toolbox, whose nets find faces, people and cars, and read actions."""

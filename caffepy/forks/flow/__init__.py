"""Nets of optical flow: FlowNet and its data augmentation."""

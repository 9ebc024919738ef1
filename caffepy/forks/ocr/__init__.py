"""Nets that read text: CTPN."""

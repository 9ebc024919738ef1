"""The rewrite of a net's schedule that computes neighbouring layers as one. net imports it."""

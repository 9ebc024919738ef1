"""Matrix products by register tiles. cpu and cpu/convolution import it."""

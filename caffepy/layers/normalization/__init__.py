"""BatchNorm, LRN, Scale and Bias. Found by name; net/fusion imports its classes."""

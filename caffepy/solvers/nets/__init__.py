"""A solver's nets: how they are made (`factory`), and which kernels they will call (`foreseen`)."""

"""Which blobs may share memory, and how much a net takes. net, solvers, plan and cli import it."""

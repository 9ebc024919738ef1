"""Data pipeline from records to batches: record order, transformation, prefetch; imported by layers/input and cli."""

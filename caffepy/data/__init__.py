"""Data pipeline from records to batches: record order, transformation, prefetching. Used by layers/input and cli."""

"""From records to batches: the order of samples, transformation, prefetching. layers/input and cli import it."""

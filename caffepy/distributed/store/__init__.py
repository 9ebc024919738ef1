"""The store: keys and values that all ranks of a job read and write over one authenticated channel."""

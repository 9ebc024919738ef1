"""`caffepy.train` and code shared with the command `caffepy train`. Above parallel; cli imports it."""

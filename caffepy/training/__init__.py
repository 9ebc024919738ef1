"""`caffepy.train`, and what the command of that name shares with it. Above parallel; cli imports it."""

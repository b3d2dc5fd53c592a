"""Libraries that users put around, under or beside an enabled model: the real packages, on a tiny
random model."""

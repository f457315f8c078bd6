"""Batch work on top of the service: runs resume, are bounded in flight, and survive a bad row."""

"""Batch work on top of the service: resumable, bounded in flight, one bad row never ends a run."""

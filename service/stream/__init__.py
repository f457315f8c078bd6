"""Token streams in Redis: a fenced, numbered log per job, its live channel, and cancellation."""

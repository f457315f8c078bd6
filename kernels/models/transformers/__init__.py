"""Models of transformers behind an adapter that puts our paged attention in."""

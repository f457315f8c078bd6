"""The compiled step for processors with AVX-512."""

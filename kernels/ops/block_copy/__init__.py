"""Copies of whole KV blocks. The CPU's form is `KVPool.copy_blocks`, two lines of torch."""

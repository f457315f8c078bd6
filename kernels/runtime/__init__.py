"""What drives a model step by step: batch buffers, KV pools, last tokens, the runner; `gpu` has the device's part."""

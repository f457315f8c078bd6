"""Matrix products. On a GPU they are cuBLAS's, through `torch.nn.functional.linear`."""

"""What a round costs on CUDA, counted on fake tensors: launches, bytes, waits of the host."""

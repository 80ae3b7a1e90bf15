"""What a round costs on CUDA, counted on fake tensors: launches, bytes, peak memory.

``counter`` counts, ``cuda_ops`` says what an operation of torch launches, ``server`` is a server
without its models, ``rounds`` names the rounds, and ``budgets.toml`` holds what they may cost.
"""

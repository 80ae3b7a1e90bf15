"""What happens before the first request: arguments, checks, memory, the exposed residual."""

"""What a routing policy gains on workloads that it is made for."""

"""The choice of a schedule: bytes, FLOPs and simulated time of every route, and the best of them."""

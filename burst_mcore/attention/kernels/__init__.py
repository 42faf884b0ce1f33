"""Local attention kernels: one table, and a readable reference beside the fast ones."""

"""The maths around the kernels: merging partial outputs, summing gradients, row-wise passes."""

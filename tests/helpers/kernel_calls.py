"""Counting what the local kernel is asked for."""

from dataclasses import replace

from burst_mcore.attention.kernels.table import KERNELS, choose
from burst_mcore.attention.resolve import call_of


def rows_of_kernel_calls():
    """The rows of queries that each call of the kernel attends, from now on in this process."""
    rows, kernel = [], KERNELS["aten-cpu"]

    def forward(q, *args):
        rows.append(q.shape[1])
        return kernel.forward(q, *args)

    KERNELS["aten-cpu"] = replace(kernel, forward=forward)
    choose.cache_clear()
    call_of.cache_clear()
    return rows

"""Runs programs: process groups, the executor, buffers, and the agreement of a ring on its calls.

topology       the ranks that share a sequence, and their nodes
communicators  the process groups of a ring
executor       runs a program: posts messages, waits, calls back for tiles
buffers        memory that passes share
head_exchange  the tensors of the all-to-all of heads
agreement      the agreement of a ring on its calls
"""

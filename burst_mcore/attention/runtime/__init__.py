"""Runs programs: process groups, the executor and buffers.

topology       the ranks that share a sequence, and their nodes
communicators  the process groups of a ring
companions     process groups that are made for it
binding        a program as a flat list of steps, made once for all its runs
executor       runs these steps: posts messages, waits, calls back for tiles
buffers        memory that passes share
head_exchange  the tensors of the all-to-all of heads
"""

"""Runs programs: process groups, the executor and buffers.

topology       the ranks that share a sequence, and their nodes
communicators  the process groups of a ring
companions     the creation of private process groups
binding        a program as a flat list of steps, cached for all executions
executor       the execution of steps: posts messages, waits, calls back for tiles
buffers        memory shared by passes
head_exchange  the tensors of the all-to-all of heads
"""

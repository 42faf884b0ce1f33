"""Doing it: process groups, the executor of a program, buffers, and the agreement of ranks on a call."""

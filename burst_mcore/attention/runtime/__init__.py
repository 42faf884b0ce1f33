"""Runs programs: process groups, the executor, buffers, and the agreement of a ring on its calls."""

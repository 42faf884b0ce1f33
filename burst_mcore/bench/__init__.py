"""The old names of burst_bench's commands, for one release: python -m burst_mcore.bench runs burst_bench.

check, report  the same for their commands
"""

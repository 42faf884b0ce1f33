"""The GPU check: each claim about a GPU as one line, with what was predicted, what is measured, and the bar.

parts      the claims, as data, in parts of at most ten minutes
__main__   runs parts, prints a line a claim, and writes the results: python -m burst_bench.check
"""

"""The GPU check: each claim about a GPU as one line, with its prediction, its measurement and its bar.

parts      the claims, as data, in parts of at most ten minutes
__main__   runs parts, prints a line a claim, and writes the results: python -m burst_bench.check
"""

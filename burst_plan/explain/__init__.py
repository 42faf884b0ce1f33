"""Schedules and masks explained before they run: predictions, dry runs, traces.

problem       a call by its numbers, as a command line gives them
predict       what a call does on a cluster, and the cost of each candidate
verify        a dry run of a schedule: no deadlock, no buffer touched in flight, every gradient home
pairs         pairs of queries and keys of each rank, and the tiles in which it computes them
chrome_trace  a timeline as a file for a trace viewer
"""

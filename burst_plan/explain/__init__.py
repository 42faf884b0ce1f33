"""Schedules and masks explained before they run: predictions, dry runs, pictures, traces.

problem       a call by its numbers, as a command line gives them
predict       what a call does on a cluster, and what each way would cost
verify        a dry run of a schedule: no deadlock, no buffer touched in flight, every gradient home
pairs         pairs of queries and keys of each rank
picture       a timeline as a picture; chrome_trace: as a file for a trace viewer
mask_picture  a mask, its tiles and each rank's work, as a picture
"""

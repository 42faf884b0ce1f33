"""The geometry of a sharded mask: query-key pairs of each pair of ranks, kernel tiles, and remote rows.

rows           ranges of rows of a tensor: counted, gathered, scattered
pattern        pieces, rectangles cut by two diagonals, and the mask pattern of one tile
plan           mask and layout, as the pieces of each pair of ranks
shard          shapes and dtypes of a rank's shard, and its place among the ranks of a ring
reading        remote rows: the rows of each rank that other ranks read
tiles          the kernel calls of a pair of ranks, and the work of a launch
cuts           cut positions of a checkpointed sequence: results of the suffix are saved
"""

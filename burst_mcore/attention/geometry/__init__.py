"""Which query rows attend to which key rows, on which rank, and who needs whose rows.

rows           ranges of rows of a tensor: counted, gathered, scattered
pattern        pieces, rectangles cut by two diagonals, and the mask pattern of one tile
plan           mask and layout, as the pieces of each pair of ranks
shard          the share of a rank: shapes, dtypes, its place among the ranks of a ring
reading        which rows of a rank others read; classes of residues of dilated masks
tiles          the kernel calls of a pair of ranks, and how much work a launch has
cuts           where a checkpointed sequence is cut: results of its tail are saved
"""

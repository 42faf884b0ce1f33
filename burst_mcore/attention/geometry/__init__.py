"""Which query rows attend to which key rows, on which rank, and who needs whose rows.

placement      which ranks share heads at a position of a ring
rows           ranges of rows of a tensor: counted, gathered, scattered
piece          a rectangle of rows cut by two diagonals
pattern        the mask pattern of one tile
plan           mask and layout, as the pieces of each pair of ranks
classes        classes of residues: a dilated mask over a fine layout
reading        which rows of a rank other ranks read
tiles          the kernel calls of a pair of ranks
cuts           where a checkpointed sequence is cut: results of its tail are saved
launches       how much work a kernel gets in one launch
"""

"""One call between the public function and the two passes.

function   the autograd function of a call, which runs forward and backward
compiled   the same as one opaque operator, for torch.compile and dispatch modes
agree      how the ranks of a ring agree on a forward, a backward, and errors
tail       the results after a cut of the sequence, which a checkpoint keeps
replay     calls in checkpointed functions: results that are saved for a recomputation
"""

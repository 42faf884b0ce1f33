"""Distributed attention: one call, from a mask and a layout to kernels on every rank of a ring.

    mask, layout   which tokens attend to which, and which rank holds which (sibling packages)
    geometry       rows, pieces and tiles: the query-key pairs of each rank, and the remote rows it needs
    schedule       a program of actions for every rank, which prints and can be verified
    numerics       the maths around tiles: partial outputs merged, gradients summed
    kernels        attention of one tile, by a table of libraries
    runtime        process groups, and the executor of a program

A folder imports only folders above it. The files of the call itself, from top to bottom:

    api            the public function
    compiled       the call as one opaque operator, for torch.compile and dispatch modes
    function       the autograd function of a call, which runs forward and backward
    agree          how the ranks of a ring agree on a forward, a backward, and errors
    replay         results that a checkpointed forward saves for its recomputation
    resolve        requests to calls, each cached; communicators
    choose         the rule: a lower bound of each route's time from counted pairs and bytes
    request        one rank's legal arguments, resolved once all ranks' lengths are known
    checks         validation of arguments
    forward, backward   the two passes: tiles x kernel x merge, driven by the ring
    call           a call that all ranks have agreed on
"""

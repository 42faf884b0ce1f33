"""Distributed attention: one call, from a mask and a layout to kernels on every rank of a ring.

    mask, layout   which tokens attend to which, and which rank holds which (packages beside this one)
    geometry       rows, pieces and tiles: which queries meet which keys, and whose rows a rank needs
    schedule       a program of actions for every rank, which prints and can be verified
    route          the rule by which a call chooses its way, from counted pairs and bytes
    numerics       the maths around tiles: partial outputs merged, gradients summed
    kernels        the maths of a tile, by a table of libraries
    runtime        process groups, and the executor of a program

A folder imports only folders above it. Beside them is the call itself, from top to bottom:

    api            the public function
    operator       one call (a folder): its autograd function, its operator, how ranks agree on it
    prepare        requests to calls, each once, or ahead of their batch
    request        one rank's legal arguments, resolved once all ranks' lengths are known
    checks         what makes arguments illegal
    forward, backward   the two passes: tiles x kernel x merge, driven by the ring
    call           a call that all ranks have agreed on
    cached         attention to a cache of keys, in generation
    shard          shapes and dtypes of a rank's share
"""

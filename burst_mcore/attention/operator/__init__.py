"""The torch operators behind the public function.

schema   named arguments, results and saved tensors, which cross flat schemas
agree    how the ranks of a ring agree on a forward, a backward, and errors
ops      the registered operators: forward, backward, tracing, autograd
"""

"""The fused LM head and loss: the logits of a whole batch never exist.

function     fused_linear_cross_entropy, and its place in autograd
arguments    a call's arguments, checked on all ranks that share the call
chunked      forward and backward over chunks of tokens, one chunk's logits at a time
products     the three matrix products of a chunk
rows         statistics and gradients of rows of logits; rows_triton: the same as Triton kernels
terms        from statistics of a token's logits to its loss
statistics   log-probabilities and entropies of labels, with gradients of both, without logits
vocabulary   the vocabulary sharded over a tensor-parallel group
checksums    how ranks that share a loss compare their tensors
whole        the loss of a whole sequence of any model, and the gradient of each rank's part
causal_lm    causal LMs of transformers, patched; deferred: logits that wait until the loss is asked for
"""

from burst_mcore.loss.causal_lm import patch_causal_lm, patch_of, unpatch_causal_lm, unpatched
from burst_mcore.loss.function import Metrics, fused_linear_cross_entropy

__all__ = [
    "Metrics",
    "fused_linear_cross_entropy",
    "patch_causal_lm",
    "patch_of",
    "unpatch_causal_lm",
    "unpatched",
]

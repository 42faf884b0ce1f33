"""The fused LM head and loss: logits exist for one chunk of tokens at a time.

function     fused_linear_cross_entropy, and its autograd function
arguments    a call's arguments, checked on all ranks of the call
chunked      forward and backward over chunks of tokens, one chunk's logits at a time
products     the three matrix products of a chunk
rows         statistics and gradients of rows of logits; rows_triton: the same as Triton kernels
terms        a token's loss from statistics of its logits
statistics   log-probabilities and entropies of labels, with gradients of both, without logits
vocabulary   the vocabulary sharded over a tensor-parallel group
checksums    comparison of tensors between ranks
whole        the loss of a whole sequence of any model, and the gradient of each rank's part
causal_lm    patches for causal LMs of transformers; deferred: logits without values, up to the loss
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

"""Agreement between ranks: what each rank brings is compared, and every rank gets the same error or none.

claims     what is compared: signatures, errors and words of ranks, and how their differences are told. Pure
exchange   how ranks learn each other's claims: collectives of a few integers, and of text
board      errors, signatures and places that ranks leave for each other in a store
watch      the thread of a rank that makes the exchanges, and sees whose pass failed and where others stand
calls      numbered calls, which wait for the exchange or go ahead; a rank that refuses one waits for nobody

Attention agrees by `calls`; the loss and DeepSpeed's adapter use `exchange` alone.
"""

from burst_mcore.agreement.calls import DESTROYED, Agreed, Agreement, Latest
from burst_mcore.agreement.claims import Claim, Signature, alike, digest_of, disagreement, summary
from burst_mcore.agreement.exchange import Collective, claims_of

__all__ = [
    "DESTROYED",
    "Agreed",
    "Agreement",
    "Claim",
    "Collective",
    "Latest",
    "Signature",
    "alike",
    "claims_of",
    "digest_of",
    "disagreement",
    "summary",
]

"""Agreement between ranks: what each rank brings is compared, and every rank gets the same error or none.

claims     what is compared: signatures, errors and words of ranks, and how their differences are told. Pure
exchange   how ranks learn each other's claims: collectives of a few integers, and of text
board      errors, signatures and places that ranks leave for each other in a store
watch      the thread of a rank that makes the exchanges, and sees whose pass failed and where others stand
calls      `Agreement`: numbered calls, which wait for the exchange or go ahead; refusals wait for nobody

Attention, recurrences and places of programs agree by `Agreement`; the loss and loaders use `exchange` alone.
"""

from burst_mcore.agreement.calls import DESTROYED, Agreed, Agreement, Latest, refusing
from burst_mcore.agreement.claims import REFUSED, Claim, Signature, alike, digest_of, disagreement
from burst_mcore.agreement.exchange import claims_of, integers_of

__all__ = [
    "DESTROYED",
    "REFUSED",
    "Agreed",
    "Agreement",
    "Claim",
    "Latest",
    "Signature",
    "alike",
    "claims_of",
    "digest_of",
    "disagreement",
    "integers_of",
    "refusing",
]

"""Agreement between ranks: what each rank brings is compared, and every rank gets the same error or none.

claims   what is compared, signatures, errors and words of ranks; collectives that exchange it; how it differs
board    errors, signatures and places that ranks leave for each other in a store
watch    the thread of a rank that exchanges words, and sees who failed and where others stand
calls    `Agreement`: numbered calls, which wait for the exchange or go ahead; refusals wait for nobody

Attention, recurrences and places of programs agree by `Agreement`; the loss and loaders use `claims` alone.
"""

from burst_mcore.agreement.calls import DESTROYED, Agreed, Agreement, Latest, refusing
from burst_mcore.agreement.claims import (
    REFUSED,
    Claim,
    Signature,
    alike,
    claims_of,
    digest_of,
    disagreement,
    integers_of,
)

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

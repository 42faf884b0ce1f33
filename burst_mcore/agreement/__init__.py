"""Agreement between ranks: claims of all ranks are compared, and every rank gets the same error or none.

claims     `Claim`, its integers by which ranks compare it, and the text of differences
watch      `Watch`, the thread of a rank of a ring that exchanges claims, and sees who failed
agreement  `Agreement` and its four verbs: refusing, meet, ring, settle; `Ring`, which may go ahead
groups     `Group`, the same verbs by collectives of a caller's process group

Attention, recurrences, forwards over shards and other sync points agree by `Ring`; the loss, loaders and
set-up by `Group`.
"""

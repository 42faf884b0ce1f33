"""Agreement between ranks: claims of all ranks are compared, and every rank gets the same error or none.

claims     `Claim`, what a rank brings to a meeting, and the text of differences
watch      `Watch`, the thread of a rank of a ring that exchanges claims, and sees who failed
agreement  `Agreement` and its four verbs: refusing, meet, ring, settle; `Ring`, for attention and sync points
"""

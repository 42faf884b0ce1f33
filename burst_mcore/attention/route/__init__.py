"""The rule by which a call chooses its way: degrees of head parallelism, ring, and the side that travels.

ways       the routes that ranks, shapes and settings allow
question   a call as the rule sees it, with the settings left open, bytes of messages, seconds of kernels
choose     a bound of each way from counted pairs and bytes, and the plainest of the best
"""

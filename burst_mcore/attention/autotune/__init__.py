"""The choice of a schedule: bytes, FLOPs and simulated time of every route, and the best of them.

cost           bytes and FLOPs of a pass
simulate       a schedule against time, rank by rank
lockstep       the same for ranks that do alike
ways           the routes that ranks, shapes and settings allow
question       a call as the model sees it, the representative of its kind, and the settings to search
choose         a way to run a call with its kind and cost, the best of some, and the reason
costing        the costs of ways, by simulation
search         which ways are tried, and in which order
decide         how a call runs, remembered by kind: by a search where more than one way is left
"""

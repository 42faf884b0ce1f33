"""The choice of a schedule: bytes, FLOPs and simulated time of every route, and the best of them.

cost           bytes and FLOPs of a pass
simulate       a schedule against time, rank by rank
lockstep       the same for ranks that do alike
bounds         lower bounds of a route's time
ways           the routes that ranks, shapes and settings allow
candidate      a way to run a call, and its cost
costing        the costs of ways, by simulation
choose         the best candidate, and the reason
search         the ways that are tried
kind           the representative of a kind of layout and mask
decide         the route of a call, remembered by kind
"""

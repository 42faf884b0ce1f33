"""Programs of actions for every rank: rings, the direct exchange and the exchange of heads.

actions        the actions of a program: send, receive, wait, compute, add
carried        the rows of each message: all, or the rows that a rank down the ring reads under the mask
ring           programs of the double ring, the flat ring and the mirrored ring
direct         programs of the all-to-all P2P exchange: every row goes straight to its readers
heads          the all-to-all of heads around a ring's program
route          a route, the program of each rank on the route, and the communicator of each channel
"""

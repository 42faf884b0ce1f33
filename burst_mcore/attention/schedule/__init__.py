"""Programs of actions for every rank: rings, the direct exchange and the exchange of heads.

actions        the actions of a program: send, receive, wait, compute, add
carried        which rows a message carries: all, or those that a mask lets somebody read
ring           programs of the double ring, the flat ring and the mirrored ring
direct         programs of the exchange in which every row goes straight to its readers
heads          the all-to-all of heads around a ring's program
route          a route, the program of each rank on the route, and the communicator of each channel
"""

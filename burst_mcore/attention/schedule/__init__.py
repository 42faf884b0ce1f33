"""Programs of actions for every rank: rings, the direct exchange and the exchange of heads."""

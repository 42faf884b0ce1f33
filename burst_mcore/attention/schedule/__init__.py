"""Who does what when: rings, the direct exchange and the head exchange, as programs of actions."""

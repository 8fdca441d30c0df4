"""Whole episodes beside training, in a process of their own, and films of them."""

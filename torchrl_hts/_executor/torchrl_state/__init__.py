"""The schedule of rounds, the shared memory, and the words that all exchange over it."""

"""Several learners as one: who they are, how they add gradients, and in which order they talk."""

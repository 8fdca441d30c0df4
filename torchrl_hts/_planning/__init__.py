"""What is decided before the first round: arguments, batches, and numbers of workers."""

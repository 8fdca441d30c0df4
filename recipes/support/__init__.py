"""What the recipes share: options, metrics, display, loggers, checkpoints, and the loop's frame."""

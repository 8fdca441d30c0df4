"""Starting, talking to and ending processes, and what the system offers. Knows no rounds."""

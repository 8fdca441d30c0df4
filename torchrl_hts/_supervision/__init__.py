"""Workers are started, listened to, replaced and ended."""

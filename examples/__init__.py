"""Programs that show the event bus at work."""

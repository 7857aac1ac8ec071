"""Run files as other programs read them, a file a format."""

"""Populations: users and their examples, on disk, in memory, divided and read."""

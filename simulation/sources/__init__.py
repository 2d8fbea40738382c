"""Readers of the files that people have: each yields records of users' examples."""

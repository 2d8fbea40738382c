"""Tools that maintain the repository."""

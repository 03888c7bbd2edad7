"""What ranks tell one another."""

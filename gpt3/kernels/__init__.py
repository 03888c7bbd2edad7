"""A kernel for the gradient of the embedding."""

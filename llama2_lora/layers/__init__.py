"""The layers: written by hand, and as modules under autograd."""

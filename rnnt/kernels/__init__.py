"""Kernels of the joint, the loss and LAMB."""

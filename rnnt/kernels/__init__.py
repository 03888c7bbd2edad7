"""Kernels of the joint, the loss, LAMB and the LSTM."""

"""Greedy decoding and the word error rate."""

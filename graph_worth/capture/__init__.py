"""Graphs on either device: capture, checks, replay; host graphs, the stand-in without a GPU; Lightning."""

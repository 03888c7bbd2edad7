"""The frame of a training script: its command line, training by hand, and what that prints."""

"""The steps of `make bench` for one build: parity, capture, cycles of blocks, profiles, and checks of their facts."""

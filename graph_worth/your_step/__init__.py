"""A training step of your own as a model of the suite: `make measure STEP=my_step.py:build` measures it."""

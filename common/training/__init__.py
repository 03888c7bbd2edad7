"""What models train with: optimizers, precision, collectives, schedules, memory plans, files of data and weights."""

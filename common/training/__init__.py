"""Training code of all models: optimizers, precision, collectives, schedules, memory plans, data and weights."""

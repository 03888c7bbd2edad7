"""Files of data and weights that a user names: limits, tokens, safetensors, checkpoints."""

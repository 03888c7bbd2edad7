"""The plan of the tensors that layers keep for their backward, and layers that run again."""

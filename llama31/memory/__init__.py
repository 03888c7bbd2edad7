"""What layers keep for their backward, and layers that run again."""

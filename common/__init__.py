"""Code that training scripts share: configuration, capture, training, measuring and machine facts."""

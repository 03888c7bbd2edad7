"""Jobs of Slurm: submitting them, their progress, and tables of what they measured."""

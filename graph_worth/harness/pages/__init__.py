"""Table and page of a run."""

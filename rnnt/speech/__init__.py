"""Real speech: folders, transcripts, features and batches."""

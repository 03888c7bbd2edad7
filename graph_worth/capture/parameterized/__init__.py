"""Parameterized launches: captured graphs without a private pool, static inputs or copies."""

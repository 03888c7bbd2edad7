"""The commands and pages of the suite, on top of the instrument: they know no model."""

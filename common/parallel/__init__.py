"""Several ranks: groups, collectives that graphs can hold, and messages between hosts."""

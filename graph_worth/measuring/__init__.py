"""Measuring in blocks: what runs inside of a worker process. Nothing here judges a number or publishes one."""

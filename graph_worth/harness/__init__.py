"""The side that asks and judges: request, processes, run file, verdict, table. It needs no torch."""

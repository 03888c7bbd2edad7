"""The figures: front (README's three), throughput (TFLOP/s against memory), speed (what is gained), steps (where time
goes), cost (memory, scope), scale (clusters).

They are drawn from evidence, with words and one style. Needs matplotlib.
"""

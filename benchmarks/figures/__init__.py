"""The figures: front (README's three), speed (what is gained), steps (where time goes), cost (memory, scope).

They are drawn from evidence, with words and one style. Needs matplotlib.
"""

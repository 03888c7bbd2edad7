"""The figures, by idea: speed (what is gained), steps (where time goes), cost (what it takes). Needs matplotlib."""

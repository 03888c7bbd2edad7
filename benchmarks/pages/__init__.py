"""Text for people: tables of runs, of one run, in READMEs, and NVIDIA's published figures."""

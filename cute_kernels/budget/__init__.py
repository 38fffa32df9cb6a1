"""The cycle budget: a card's unit rates, the kernels' demands on each unit, and the time that follows from both.

Pure Python: importable anywhere, without torch, cutlass or a GPU.
"""

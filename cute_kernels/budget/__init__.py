"""What a kernel should cost: a card's unit rates, the kernels' demands on each unit, and time from both.

Pure Python: importable anywhere, without torch, cutlass or a GPU.
"""

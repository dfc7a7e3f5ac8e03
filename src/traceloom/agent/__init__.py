"""The host agent: what devices and processes of a host do, and whose they are; answered at once, published as metrics.

    collect/ ─┐
    accelerators/ ─┼─► board.py (the latest of everything) ─► publish/ · http/
    owners/ ─┘              └─► history.py (what was)

One asyncio loop answers from memory. What waits for a device or a disk runs in a thread of its own; what computes long
runs in a process (`worker.py`). Nothing in the loop imports NumPy, Polars or torch.
"""

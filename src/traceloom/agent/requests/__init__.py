"""Requests for traces: what is wanted of which processes, how far each is, and where the result lies.

model.py ─► store.py (SQLite) ─► desk.py (runs them) ─► profilers/ ─► keeping.py (a worker: verified, compressed)
"""

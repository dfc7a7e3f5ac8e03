"""Attaching to a process that nobody prepared: its main thread is stopped for about a millisecond, and runs a fixed
text of ours when it is between two instructions of Python.

ptrace.py (one thread, stopped) ─► scheduling.py (a worker: what it is to run) ─► in_target.py (runs there)
                                                                     orders.py ◄──── says how far it is
"""

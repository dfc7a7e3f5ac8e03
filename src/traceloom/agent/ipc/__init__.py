"""libkineto's datagrams: what PyTorch's profiler in each process asks every few seconds, and what it is answered.

Protocol: dynolog's `ipcfabric`, as the libkineto of stock PyTorch speaks it.
"""

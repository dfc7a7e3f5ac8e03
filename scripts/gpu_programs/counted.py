"""Work of which everything is known beforehand: python counted.py DEVICE

Matrix products of one size, copies to the device, and blocks of memory. Prints as JSON what a
recording must hold.
"""

from __future__ import annotations

import json
import sys

import torch
from clock import Clock

PRODUCTS = 100
BLOCKS, BLOCK_BYTES = 16, 1 << 22
COPIES, COPY_BYTES = 5, 1 << 20


def main() -> None:
    """Work, and print."""
    device = sys.argv[1]
    width = 4096 if device == "cuda" else 384
    left, right, result = (torch.ones(width, width, device=device) for _ in range(3))
    torch.bmm(left[None], right[None])  # whatever is loaded with the first product
    clock = Clock(device)
    for _ in range(PRODUCTS):
        torch.mm(left, right, out=result)
    products_ns = clock.read_ns()
    if device == "cuda":
        page = torch.zeros(COPY_BYTES, dtype=torch.uint8).pin_memory()
        for _ in range(COPIES):
            page.to(device)
    blocks = [torch.empty(BLOCK_BYTES, dtype=torch.uint8, device=device) for _ in range(BLOCKS)]
    del blocks
    answer = {
        "product_count": PRODUCTS,
        "product_flops": PRODUCTS * 2 * width**3,
        "products_ns": products_ns,
        "peak_bytes": 3 * left.nbytes + BLOCKS * BLOCK_BYTES,
        "copied_bytes": COPIES * COPY_BYTES,
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main()

"""How many FLOPs and bytes one call of an operator needs, and the registry of such models.

    from traceloom.analyze import flops

    @flops.register("my::scale")
    def scale(call): tensor = call.tensor(0) return flops.Work(flops=tensor.numel, bytes=2 *
    tensor.bytes, dtype=tensor.dtype)

Conventions: a multiply-add counts 2; causal attention counts the pairs that the mask leaves; a
backward op is counted from its own recorded inputs; bytes are the least traffic, every operand
once. See docs/concepts/roofline.md.
"""

from traceloom.analyze.flops import attention, movement, pointwise, products, serving
from traceloom.analyze.flops.registry import MODELS, Call, Registry, Tensor, Unknown, Work

BUILT_IN = (attention, movement, pointwise, products, serving)
"""The modules whose models come with Traceloom."""

register = MODELS.register
remove = MODELS.remove

__all__ = [
    "BUILT_IN",
    "MODELS",
    "Call",
    "Registry",
    "Tensor",
    "Unknown",
    "Work",
    "register",
    "remove",
]

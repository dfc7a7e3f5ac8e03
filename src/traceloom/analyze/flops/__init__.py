"""How many FLOPs and bytes one call of an operator needs, from its recorded inputs; and the
registry of such models.

    from traceloom.analyze import flops

    @flops.register("my::scale")
    def scale(call):
        return flops.Work(flops=call.tensor(0).numel, bytes=2 * call.tensor(0).bytes,
        dtype=call.tensor(0).dtype)

Conventions: a multiply-add counts 2; causal attention counts the pairs that the mask leaves; a backward op is counted
from its own recorded inputs; bytes are the least traffic, every operand once. See
docs/concepts/roofline.md.
"""

from traceloom.analyze.flops import attention, movement, pointwise, products, serving
from traceloom.analyze.flops import movement as reduction
from traceloom.analyze.flops import serving as inductor
from traceloom.analyze.flops.registry import MODELS, Call, Registry, Tensor, Unknown, Work

BUILT_IN = (
    products,
    products,
    attention,
    pointwise,
    pointwise,
    pointwise,
    reduction,
    movement,
    pointwise,
    serving,
    inductor,
)
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

"""The registry: which operator has which model of its FLOPs and bytes."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import wraps

from msgspec import Struct

from traceloom.analyze.flops.call import SIZES, Call, Unknown


class Work(Struct, frozen=True):
    """What one call has to do, whatever the kernel.

    Attributes:
        flops: Floating-point operations (integer ones for integer types); a multiply-add counts 2.
        bytes: Least traffic with the device's memory: every operand is read or written once.
        dtype: Element type of the arithmetic: fp64, fp32, bf16, fp16, fp8, fp4, int8, ...
        matrix: The arithmetic can run on matrix units (tensor cores, matrix cores).
        recomputed: How many of `flops` do again what the forward pass did (attention backward without stored scores).
    """

    flops: int
    bytes: int
    dtype: str
    matrix: bool = False
    recomputed: int = 0

    def __post_init__(self) -> None:
        if self.flops < 0 or self.bytes < 0:
            raise ValueError("FLOPs and bytes cannot be negative")


Model = Callable[[Call], Work]


class _Registered(Struct, frozen=True):
    """A model, what kind of operator it is for, and whether it asks for what is inside a call."""

    model: Model
    family: str
    inside: bool


_MOST = 1 << 56  # minutes of the fastest device for one call; sums of many calls must stay in 64 bits


class Registry:
    """Models by the names of operators."""

    def __init__(self) -> None:
        self._exact: dict[str, _Registered] = {}
        self._patterns: dict[str, _Registered] = {}
        self.generation = 0  # grows with every change, so that remembered results are not used after it

    def register(
        self, *names: str, family: str = "own", inputs: int | None = None, inside: bool = False
    ) -> Callable[[Model], Model]:
        """Give operators a model; a later one replaces an earlier one.

        Args:
            names: Names as they stand in traces; `*` stands for anything (an exact name goes before a pattern).
            family: What kind of operator it is; for tables.
            inside: The model asks for the calls and kernels inside.
            inputs: The most inputs that it has. Old profilers sometimes record those of another operator before its
                own; such a call is then not modelled.
        """

        def add(original: Model) -> Model:
            @wraps(original)
            def model(call: Call) -> Work:
                if inputs is not None and len(call.shapes) > inputs:
                    raise Unknown("more inputs are recorded than the operator has")
                return original(call)

            for name in names:
                (self._patterns if "*" in name else self._exact)[name] = _Registered(model, family, inside)
            self.generation += 1
            return original

        return add

    def remove(self, *names: str) -> None:
        """Take models away; names without one are passed over."""
        for name in names:
            self._exact.pop(name, None)
            self._patterns.pop(name, None)
        self.generation += 1

    def looks_inside(self, name: str) -> bool:
        """Whether the model of an operator asks for what is inside a call."""
        registered = self._registered(name)
        return registered is not None and registered.inside

    def family(self, name: str) -> str | None:
        """What kind of operator has that name; None where it has no model."""
        registered = self._registered(name)
        return registered.family if registered else None

    def find(self, name: str) -> Model | None:
        """The model of an operator, or None."""
        registered = self._registered(name)
        return registered.model if registered else None

    def _registered(self, name: str) -> _Registered | None:
        exact = self._exact.get(name)
        if exact is not None:
            return exact
        return next((registered for pattern, registered in self._patterns.items() if fnmatchcase(name, pattern)), None)

    def names(self) -> dict[str, str]:
        """Name or pattern -> family, in the order of registration."""
        return {
            name: registered.family for table in (self._exact, self._patterns) for name, registered in table.items()
        }

    def work(self, call: Call) -> Work | str:
        """What the call has to do, or the reason why that is not known."""
        model = self.find(call.name)
        if model is None:
            return "no model for this operator"
        try:
            work = model(call)
        except Unknown as why:
            return str(why)
        except (ArithmeticError, AssertionError, AttributeError, LookupError, TypeError, ValueError) as error:
            return f"the model cannot read the recorded inputs ({type(error).__name__}: {error})"
        if not isinstance(work, Work) or work.dtype not in SIZES:
            return "the model gave no usable answer"
        if max(work.flops, work.bytes, work.recomputed) > _MOST:
            return "the recorded shapes are too large to be true"
        return work


MODELS = Registry()

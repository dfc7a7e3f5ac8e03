"""A folded program as Python functions: one for each block, one for the whole, and one for what comes from outside."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from traceloom.model import units
from traceloom.replay.plan import COLLECTIVE
from traceloom.replay.rank_text import Names, RankText, function
from traceloom.replay.repeats import Folded, ProgramLine, fold


class Functions:
    """The functions of one rank.

    Args:
        text: What the rank does.

    Attributes:
        folded: Its blocks.
    """

    def __init__(self, text: RankText) -> None:
        self._text = text
        regions = [(op["phase"], op["scope"]) for op in text.ops]
        starts = frozenset(k for k in range(1, len(regions)) if regions[k] != regions[k - 1])
        self.folded: Folded = fold(text.lines, starts)
        self._order = self.folded.outermost_first()
        bodies = self.folded.bodies
        self._last: list[dict[int, int]] = [{} for _ in bodies]  # register -> line of its last use
        for body, last in zip(bodies, self._last, strict=True):
            for at, line in enumerate(body):
                last.update(dict.fromkeys([*line.reads, *line.writes], at))
        self._returned = self._find_returned()
        self._handles = self._find_handles()
        outside: dict[int, str] = {}
        made: set[int] = set()
        for line in bodies[0]:
            for register in line.reads:
                if register not in made and register not in outside:
                    outside[register] = f"w[{len(outside)}]"
            made.update(line.writes)
        self._outside = outside
        self._same = self._find_same()
        self._takes_w = [bool(names) for names in self._same]
        for number in reversed(self._order):
            inner = [self._takes_w[-1 - line.what] for line in bodies[number] if line.what < 0]
            self._takes_w[number] |= any(inner)

    def _find_same(self) -> list[dict[int, str]]:
        """Of each block: parameters that all calls give the same tensor from outside, as weights: these are not passed.

        Returns:
            Parameter -> name of the tensor.
        """
        same: list[dict[int, str]] = [dict(self._outside), *({} for _ in self.folded.bodies[1:])]
        seen: set[int] = set()
        for body in self._order:
            for line in self.folded.bodies[body]:
                if line.what < 0:
                    block = -1 - line.what
                    names = {k: same[body][r] for k, r in enumerate(line.reads) if r in same[body]}
                    same[block] = names if block not in seen else dict(same[block].items() & names.items())
                    seen.add(block)
        return same

    def _find_returned(self) -> list[list[int]]:
        """Of each body: what of its own registers somebody needs after it."""
        needed: list[set[int]] = [set() for _ in self.folded.bodies]
        for body in self._order:
            for at, line in enumerate(self.folded.bodies[body]):
                if line.what < 0:
                    used = (self._last[body][r] > at or r in needed[body] for r in line.writes)
                    first = self.folded.parameters[-1 - line.what]
                    needed[-1 - line.what].update(first + k for k, is_used in enumerate(used) if is_used)
        return [sorted(registers) for registers in needed]

    def _find_handles(self) -> list[set[int]]:
        """Of each body: which of its registers hold what a collective started."""
        handles: list[set[int]] = [set() for _ in self.folded.bodies]
        for body in reversed(self._order):
            for line in self.folded.bodies[body]:
                if line.what < 0:
                    inner, first = -1 - line.what, self.folded.parameters[-1 - line.what]
                    handles[body].update(r for k, r in enumerate(line.writes) if first + k in handles[inner])
                elif self._text.meanings[line.what]["action"] == COLLECTIVE:
                    handles[body].update(line.writes)
        return handles

    def write(self, suffix: str = "") -> str:
        """All functions, those that are called first.

        Args:
            suffix: Behind their names, where there are several ranks' in one file.
        """
        self._names = {
            body: f"block_{number}{suffix}"
            for number, body in enumerate((body for body in reversed(self._order) if body), start=1)
        }
        made = [*self._text.external(self._outside, self._outside.__getitem__), "return w"]
        about = "What comes from outside: parameters, inputs, states."
        outside = function(f"outside{suffix}", "", "dict[int, torch.Tensor]", about, ["w = {}", *made])
        blocks = [self._block(body) for body in self._names]
        body = [*self._lines(0)] or ["pass"]
        step = function(f"step{suffix}", "w: dict[int, torch.Tensor]", "None", "All that was recorded, in order.", body)
        return "\n\n\n".join([outside, *blocks, step])

    def _block(self, body: int) -> str:
        first_ns = sum(map(self._time_ns, self.folded.bodies[body]))
        took = f"; the first took {units.duration(first_ns)}" if first_ns else ""
        name = self._namer(body)
        own = [name(k) for k in range(self.folded.parameters[body]) if k not in self._same[body]]
        parameters = ", ".join(["w"] * self._takes_w[body] + own)
        about = f"Called {self.folded.calls()[body]} times{took}."
        lines = [*self._lines(body)]
        if self._returned[body]:
            lines.append(f"return {_grouped([name(register) for register in self._returned[body]])}")
        return function(self._names[body], parameters, "", about, lines)

    def _time_ns(self, line: ProgramLine) -> int:
        if line.what < 0:
            return sum(map(self._time_ns, self.folded.bodies[-1 - line.what]))
        return self._text.recorded_ns(self._text.ops[line.source])

    def _namer(self, body: int) -> Names:
        """What the registers of a body are called: `w[0]` from outside, `p0` given, `t0` made, `h0` being awaited."""
        counts: Counter[str] = Counter()
        names = dict(self._same[body])
        for register in range(self.folded.parameters[body]):
            if register not in names:
                names[register] = f"p{counts['p']}"
                counts["p"] += 1
        for line in self.folded.bodies[body]:
            for register in line.writes:
                if register not in names:
                    letter = "h" if register in self._handles[body] else "t"
                    names[register] = f"{letter}{counts[letter]}"
                    counts[letter] += 1
        return names.__getitem__

    def _lines(self, body: int) -> Iterator[str]:
        name = self._namer(body)
        kept = {*self._returned[body], *(self._outside if body == 0 else range(self.folded.parameters[body]))}
        region: tuple[str | None, str] = (None, "")
        for at, line in enumerate(self.folded.bodies[body]):
            op = self._text.ops[line.source]
            if region != (region := (op["phase"], op["scope"])) and any(region):
                yield "# " + ": ".join(ascii(part)[1:-1] for part in region if part)
            dead = {r for r in (*line.reads, *line.writes) if self._last[body][r] == at and r not in kept}
            wanted = self._wanted(line)
            targets = ["_" if r is None or r in line.reads or r in dead else name(r) for r in wanted]
            call = self._call(line, name)
            ended = [name(r) for r in dict.fromkeys(line.reads) if r in dead]
            if any(target != "_" for target in targets):
                is_list = line.what >= 0 and self._text.gives_list(line.what)
                yield f"{_grouped(targets, single=not is_list)} = {call}"
                ended += ["_"] * ("_" in targets)
            else:
                yield call
            if ended:
                yield f"del {_grouped(ended)}"

    def _wanted(self, line: ProgramLine) -> list[int | None]:
        """The registers of what a line gives, one for each; None where nothing holds it."""
        if line.what < 0:
            first = self.folded.parameters[-1 - line.what]
            return [line.writes[register - first] for register in self._returned[-1 - line.what]]
        made = iter(line.writes)
        return [None if output is None else next(made) for output in self._text.meanings[line.what]["outputs"]]

    def _call(self, line: ProgramLine, name: Names) -> str:
        if line.what < 0:
            block = -1 - line.what
            passed = [name(r) for k, r in enumerate(line.reads) if k not in self._same[block]]
            return f"{self._names[block]}({', '.join(['w'] * self._takes_w[block] + passed)})"
        return self._text.expression(self._text.meanings[line.what], [name(r) for r in line.reads])


def _grouped(names: list[str], *, single: bool = True) -> str:
    """Several names in brackets, so that the line may be broken; one as it is, unless it is one of a list."""
    return names[0] if single and len(names) == 1 else f"({', '.join(names)}{',' * (len(names) == 1)})"

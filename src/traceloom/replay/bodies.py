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
        needed: list[set[int]] = [set() for _ in bodies]  # of its own registers, by somebody after the body
        for number in self._order:
            for at, line in enumerate(bodies[number]):
                if line.what < 0:
                    used = (self._last[number][r] > at or r in needed[number] for r in line.writes)
                    first = self.folded.parameters[-1 - line.what]
                    needed[-1 - line.what].update(first + k for k, is_used in enumerate(used) if is_used)
        self._returned = [sorted(registers) for registers in needed]
        self._handles: list[set[int]] = [set() for _ in bodies]  # registers that hold what a collective started
        for number in reversed(self._order):
            for line in bodies[number]:
                if line.what < 0:
                    block, first = -1 - line.what, self.folded.parameters[-1 - line.what]
                    handles = {r for k, r in enumerate(line.writes) if first + k in self._handles[block]}
                    self._handles[number].update(handles)
                elif text.meanings[line.what]["action"] == COLLECTIVE:
                    self._handles[number].update(line.writes)
        outside: dict[int, str] = {}
        made: set[int] = set()
        for line in bodies[0]:
            for register in line.reads:
                if register not in made and register not in outside:
                    outside[register] = f"w[{len(outside)}]"
            made.update(line.writes)
        self._outside = outside
        # Of each block: parameters that all calls give the same tensor from outside, as weights, with its name: these
        # are not passed.
        self._same: list[dict[int, str]] = [dict(outside), *({} for _ in bodies[1:])]
        seen: set[int] = set()
        for number in self._order:
            same = self._same[number]
            for line in bodies[number]:
                if line.what < 0:
                    block = -1 - line.what
                    names = {k: same[r] for k, r in enumerate(line.reads) if r in same}
                    self._same[block] = names if block not in seen else dict(self._same[block].items() & names.items())
                    seen.add(block)
        self._takes_w = [bool(names) for names in self._same]
        for number in reversed(self._order):
            inner = [self._takes_w[-1 - line.what] for line in bodies[number] if line.what < 0]
            self._takes_w[number] |= any(inner)

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
        blocks = []
        for body, called in self._names.items():
            first_ns = sum(map(self._time_ns, self.folded.bodies[body]))
            took = f"; the first took {units.duration(first_ns)}" if first_ns else ""
            name = self._namer(body)
            own = [name(k) for k in range(self.folded.parameters[body]) if k not in self._same[body]]
            parameters = ", ".join(["w"] * self._takes_w[body] + own)
            lines = [*self._lines(body)]
            if self._returned[body]:
                lines.append(f"return {_grouped([name(register) for register in self._returned[body]])}")
            about = f"Called {self.folded.calls()[body]} times{took}."
            blocks.append(function(called, parameters, "", about, lines))
        lines = [*self._lines(0)] or ["pass"]
        about = "All that was recorded, in order."
        step = function(f"step{suffix}", "w: dict[int, torch.Tensor]", "None", about, lines)
        return "\n\n\n".join([outside, *blocks, step])

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
            wanted: list[int | None]  # the registers of what the line gives; None where nothing holds it
            if line.what < 0:
                block, first = -1 - line.what, self.folded.parameters[-1 - line.what]
                wanted = [line.writes[register - first] for register in self._returned[block]]
                passed = [name(r) for k, r in enumerate(line.reads) if k not in self._same[block]]
                call = f"{self._names[block]}({', '.join(['w'] * self._takes_w[block] + passed)})"
            else:
                meaning, made = self._text.meanings[line.what], iter(line.writes)
                wanted = [None if output is None else next(made) for output in meaning["outputs"]]
                call = self._text.expression(meaning, [name(r) for r in line.reads])
            targets = ["_" if r is None or r in line.reads or r in dead else name(r) for r in wanted]
            ended = [name(r) for r in dict.fromkeys(line.reads) if r in dead]
            if any(target != "_" for target in targets):
                is_list = line.what >= 0 and self._text.gives_list(line.what)
                yield f"{_grouped(targets, single=not is_list)} = {call}"
                ended += ["_"] * ("_" in targets)
            else:
                yield call
            if ended:
                yield f"del {_grouped(ended)}"


def _grouped(names: list[str], *, single: bool = True) -> str:
    """Several names in brackets, so that the line may be broken; one as it is, unless it is one of a list."""
    return names[0] if single and len(names) == 1 else f"({', '.join(names)}{',' * (len(names) == 1)})"

"""Names of host events: public ones stay, others get a pseudonym that means the same to every analysis.

What an analysis reads out of a name (a phase, a step, a call that waits, a collective) is put into the pseudonym as a
word; the words are few and say nothing else.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from traceloom.analyze import phases
from traceloom.analyze.blocking import BY_NAME
from traceloom.analyze.data_loading import SPAN
from traceloom.anonymize.key import Key
from traceloom.anonymize.policy import COLLAPSE, KEEP, Policy
from traceloom.anonymize.public import host_names, sections
from traceloom.read.collectives import kind_of

_EVALUATE = "autograd::engine::evaluate_function: "
STEP = re.compile(r"(ProfilerStep#\s*|traceloom\.step#\s*)(\d{1,9})")
_OPTIMIZER = re.compile(r"Optimizer\.(step|zero_grad)#(\w+)\.(step|zero_grad)")
_LOADER = re.compile(r"enumerate\(DataLoader\)#_(Single|Multi)Process(ing)?DataLoaderIter\.__next__")
_BACKEND = re.compile(r"(nccl|rccl|gloo|mpi|ucc|xccl|oneccl|hccl):\s*(.*)", re.DOTALL)
_PEER = re.compile(r"(->|<-)\s*(\d{1,6})")
_MODULE = re.compile(r"nn\.Module: (.*?)(_\d+)?", re.DOTALL)
_DIGITS = re.compile(r"\d+")
COMMUNICATION = re.compile(r"(nccl|rccl|gloo|mpi|ucc|xccl|oneccl|hccl):|record_param_comms$")
LOADING = re.compile(SPAN)
_KNOWN_KINDS = sections()["kinds"]
# What PyTorch itself calls the operations, beside the kinds.
OPERATIONS = sections()["operations"]
_LOADER_ITERATOR = "_BaseDataLoaderIter"  # wherever it stands, time goes into loading
_NAMED = (  # a mark at the front of a name, and what it becomes; the first that fits
    (re.compile(r"^enumerate\(DataLoader\)#"), "enumerate(DataLoader)#{}"),
    (re.compile(SPAN), "enumerate(SomeDataLoader)#{}"),
    (re.compile(r"^autograd::engine::"), "autograd::engine::{}"),
    (re.compile(r"^Optimizer\.step#"), "Optimizer.step#{}"),
    (re.compile(r"^Optimizer\.zero_grad#"), "Optimizer.zero_grad#{}"),
    (re.compile(r"^Optimizer\."), "Optimizer.{}"),
    (re.compile(r"^_c10d_functional::"), "_c10d_functional::{}"),
    (re.compile(r"^_c10d::"), "_c10d::{}"),
    (re.compile(r"^c10d_functional::"), "c10d_functional::{}"),
    (re.compile(r"^c10d::"), "c10d::{}"),
    (re.compile(r"^torch(\.|::)distributed(\.ddp)?(\.|::)reducer"), "torch.distributed.ddp.reducer::{}"),
    (re.compile(r"^ProfilerStep"), "ProfilerStep {}"),
    (re.compile(r"^traceloom\.step"), "traceloom.step.{}"),
    (re.compile(r"^traceloom\."), "traceloom.{}"),
    (re.compile(r"^PyTorch Profiler"), "PyTorch Profiler {}"),
    (re.compile(r"^\["), "[{}]"),
)
_WORDS = tuple(
    (re.compile(pattern), word)
    for (_, pattern), word in zip(phases.WORD_PHASES, ("data_load", "forward", "backward", "optimizer"), strict=True)
)
_PYTHON = tuple((phase, re.compile(pattern)) for phase, pattern in phases.PYTHON_PHASES)
_PUBLIC_FRAME = re.compile(
    r"(?:^|/)(torch/_tensor\.py\(\d{1,6}\): backward"
    r"|torch/autograd/(?:__init__|graph)\.py\(\d{1,6}\): (?:backward|grad|_engine_run_backward)"
    r"|torch/utils/data/dataloader\.py\(\d{1,6}\): __next__"
    r"|threading\.py\(\d{1,6}\): (?:wait|_wait_for_tstate_lock))$"
)
_COLLECTING = ("Python GC", "<built-in function collect>")  # where Python collects garbage
_BUILT_IN = re.compile(phases.BLOCKING_PYTHON)
_PLACE_OF_PHASE = {
    phases.LOADING: "torch/utils/data/{}",
    phases.BACKWARD: "torch/autograd/graph.py(0): backward",
    phases.OPTIMIZER: "torch/optim/{}",
    phases.COMMUNICATION: "torch/distributed/distributed_c10d.py {}",
}
_BLOCKING = re.compile(BY_NAME)
_BLOCKING_ELSEWHERE = re.compile(phases.BLOCKING_RUNTIME)
_CALL_WORDS = ("Launch", "Graph", "Memcpy", "Memset", "Malloc", "Free", "EventRecord", "StreamWaitEvent", "Query")
_THREAD = re.compile(r"python[\d.]{0,8}|pt_main_thread|pt_autograd_\d{1,4}|pt_data_(pin|worker)|stream \d{1,10} *|")
_INNER_THREAD = re.compile(r"thread -?\d+ \((.*)\)", re.DOTALL)
_PLAIN_THREAD = re.compile(r"thread -?\d+")
_LANE = re.compile(r"Spans|Traces|PyTorch Profiler|__cupti_profiler__|GPU \d{1,3} Counters|GPU \d{1,3}|CPU|")


class Pseudonyms:
    """What names become, by the policy; each distinct name is looked at once.

    Attributes:
        originals: Pseudonym -> name, for the owner's map.
        kept: Names that stayed as they are although they are not public (the policy says so).
        numbers: Pseudonym -> process or thread, for the owner's map.
    """

    def __init__(self, key: Key, policy: Policy) -> None:
        self._key = key
        self._policy = policy
        self._keep = re.compile("|".join(f"(?:{text})" for text in policy.keep_names)) if policy.keep_names else None
        self._known: dict[tuple[str, str], str] = {}
        self.originals: dict[str, str] = {}
        self.kept: set[str] = set()
        self.numbers: dict[int, int] = {}

    # -- what every kind of name goes through -----------------------------------------------------------------

    def shown(self, kind: str, name: str, make: Callable[[str], str]) -> str:
        """The name as it is shown; `kind` keeps names of different kinds apart."""
        remembered = self._known.get((kind, name))
        if remembered is not None:
            return remembered
        if self._keep is not None and self._keep.fullmatch(name):
            made = self.keep(name)
        else:
            made = make(name)
            if made != name:
                self.originals.setdefault(made, name)
        self._known[kind, name] = made
        return made

    def hidden(self) -> set[str]:
        """All names that became something else."""
        return {name for (_, name), shown in self._known.items() if shown != name}

    def unchanged(self) -> set[str]:
        """All names that are public and stayed as they are."""
        return {name for (_, name), shown in self._known.items() if shown == name} - self.kept

    def keep(self, name: str) -> str:
        """A name that the policy keeps, whatever it is."""
        self.kept.add(name)
        return name

    def letters(self, text: str) -> str:
        """The letters of a pseudonym."""
        return self._key.letters(text)

    def pseudonym(self, prefix: str, name: str) -> str:
        """`prefix_letters`; names that differ in their digits only have the same letters and a number behind."""
        return self.shown(prefix, name, lambda text: self._numbered(prefix, text))

    def _numbered(self, prefix: str, name: str) -> str:
        if _DIGITS.search(name) is None:
            return f"{prefix}_{self._key.letters(name)}"
        return f"{prefix}_{self._key.letters(_DIGITS.sub('#', name))}#{self._key.number(name)}"

    # -- operators, autograd nodes, annotations ---------------------------------------------------------------

    def host(self, name: str) -> str:
        """An operator or annotation; the same in host traces and device traces."""
        return self.shown("host", name, self._host)

    def _host(self, name: str) -> str:
        if self._policy.public_names == KEEP and name in host_names():
            return name
        if self._policy.names == KEEP:
            return self.keep(name)
        optimizer, backend = _OPTIMIZER.fullmatch(name), _BACKEND.fullmatch(name)
        if name in sections()["regions"] or STEP.fullmatch(name) or _LOADER.fullmatch(name):
            return name
        if optimizer and optimizer[2] in sections()["optimizers"]:
            return name
        if name.startswith(_EVALUATE):
            shown = _EVALUATE + self.host(name[len(_EVALUATE) :])
        elif name.startswith(phases.SCOPE_PREFIX):
            # All words of phases stay in their part, so that scopes stay within each other.
            shown = phases.SCOPE_PREFIX + ".".join(
                "".join([self._numbered("scope", part), *(f" ({word})" for mark, word in _WORDS if mark.search(part))])
                for part in name[len(phases.SCOPE_PREFIX) :].split(".")
            )
        elif name.startswith("nn.Module: "):
            shown = self._module(name)
        elif backend:  # `nccl:all_reduce`, `gloo:send 0->1`: kind and peer stay
            operation = backend[2]
            peer = _PEER.search(operation)
            plain, kind = operation.split(" ", 1)[0], kind_of(operation)
            if plain not in OPERATIONS or kind_of(plain) != kind:
                plain = f"{kind if kind in _KNOWN_KINDS else 'call'}_{self._key.letters(operation)}"
            shown = f"{backend[1]}:{plain}" + (f" {peer[1]}{peer[2]}" if peer else "")
        else:
            shown = f"op_{self._key.letters(name)}" if "::" in name else self._numbered("region", name)
            shown = next((template for mark, template in _NAMED if mark.search(name)), "{}").format(shown)
            if name.startswith("[") and not shown.startswith("["):
                shown = f"[{shown}]"
            shown += "".join(f" ({word})" for mark, word in _WORDS if mark.search(name) and not mark.search(shown))
        return f"{shown} {_LOADER_ITERATOR}" if _LOADER_ITERATOR in name and _LOADER_ITERATOR not in shown else shown

    def _module(self, name: str) -> str:
        match = _MODULE.fullmatch(name)
        kind, number = (match[1], match[2] or "") if match else (name, "")
        if kind not in sections()["modules"] or self._policy.public_names != KEEP:
            kind = f"module_{self._key.letters(kind)}"
        return f"nn.Module: {kind}{'' if self._policy.structure == COLLAPSE else number[:8]}"

    # -- Python frames ----------------------------------------------------------------------------------------

    def python(self, name: str) -> str:
        """A Python frame or module call."""
        return self.shown("python", name, self._python)

    def _python(self, name: str) -> str:
        if self._policy.stacks == KEEP:
            return self.keep(name)
        if name.startswith("nn.Module: "):
            return self._module(name)
        public = _PUBLIC_FRAME.search(name)
        if public or name in _COLLECTING:
            return public[1] if public else name
        shown = f"python_{self._key.letters(name)}"
        waits = _BUILT_IN.match(name)
        if waits:
            return f"<built-in {waits[1]} {waits[2]} {shown}>"
        phase = next((phase for phase, pattern in _PYTHON if pattern.search(name)), None)
        return _PLACE_OF_PHASE[phase].format(shown) if phase in _PLACE_OF_PHASE else shown

    # -- runtime and driver calls, threads, lanes -------------------------------------------------------------

    def call(self, name: str) -> str:
        """A call of the runtime or the driver."""
        return self.shown("call", name, self._call)

    def _call(self, name: str) -> str:
        if name in sections()["calls"]:
            return name
        words = [word for word in _CALL_WORDS if word in name]
        if "Async" in name:
            words.append("Async")
        elif _BLOCKING.search(name) and not words:
            words.append("Synchronize")
        if _BLOCKING_ELSEWHERE.search(name):
            words.append("Synchronize")
        return "_".join([f"call_{self._key.letters(name)}", *words])

    def thread(self, name: str) -> str:
        """The name of a thread or process."""
        return self.shown("thread", name, self._thread)

    def _thread(self, name: str) -> str:
        inner = _INNER_THREAD.fullmatch(name)
        if inner:
            return self._thread(inner[1])
        if _PLAIN_THREAD.fullmatch(name):
            return ""
        if _THREAD.fullmatch(name):
            return name
        mark = "autograd_" if "autograd" in name else ""
        return f"{mark}thread_{self._key.letters(name)}"

    def lane(self, name: str) -> str:
        """A process or thread that is told by a text and not by a number."""
        return self.shown("lane", name, lambda text: text if _LANE.fullmatch(text) else self._numbered("lane", text))

    def operation(self, text: str) -> str:
        """The name of a collective operation."""
        if text in OPERATIONS:
            return text
        kind = kind_of(text)
        return kind if kind in OPERATIONS else self.pseudonym("collective", text)

    # -- groups, hosts ----------------------------------------------------------------------------------------

    def group(self, name: str) -> str:
        """A process group; short numbers say nothing and stay, since simulators want numbers."""
        if self._policy.groups == KEEP or re.fullmatch(r"\d{0,4}", name):
            return name
        if name.isdigit():
            return self.shown("group", name, lambda text: str(self._key.number(text, "group")))
        return self.shown("group", name, lambda text: f"group_{self._key.letters(text)}")

    def description(self, text: str) -> str:
        """What a process group is for."""
        return text if text in ("default_pg", "undefined", "") else self.group(text)

    def host_name(self, name: str) -> str:
        """A machine."""
        return self.shown("machine", name, lambda text: f"host_{self._key.letters(text)}")

    def process(self, number: int) -> int:
        """A process or thread of the operating system; numbers that stand for no process stay."""
        if number <= 0 or self._policy.processes == KEEP:
            return number
        shown = self._key.number(str(number), "process")
        self.numbers[shown] = number
        return shown

    def pointer(self, number: int) -> int:
        """A stream, queue or context that is given by its address."""
        small = -(1 << 16) < number < 1 << 16
        return number if small or number in (2**32 - 1, 2**64 - 1) else self._key.number(str(number), "pointer")

    def address(self, number: int) -> int:
        """An address of memory: equal ones stay equal, distances are lost."""
        return int.from_bytes(self._key.digest("address", str(number))[:6], "big") if number else 0

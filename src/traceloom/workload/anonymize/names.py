"""Pseudonyms of host and device names.

What an analysis reads from a name (a phase, a step, a blocking call, a collective) is put into the
pseudonym as a word; there are few such words, and they reveal nothing else.
"""

import re
from collections.abc import Callable

from traceloom.analyze import host_events
from traceloom.analyze.collective_names import KERNEL_KINDS
from traceloom.analyze.data_loading import LOADER_SPAN
from traceloom.analyze.host_events import BLOCKING_CALL_PATTERN
from traceloom.analyze.kernel_rules import load_built_in_category_rules
from traceloom.formats.links import classify_collective
from traceloom.trace.vocabulary import copy_kind, parse_memory_kinds
from traceloom.workload.anonymize.policy import (
    COLLAPSE,
    KEEP,
    Key,
    Policy,
    list_host_names,
    read_sections,
)

_EVALUATE = "autograd::engine::evaluate_function: "
STEP = re.compile(r"(ProfilerStep#\s*|traceloom\.step#\s*)(\d{1,9})")
_OPTIMIZER = re.compile(r"Optimizer\.(step|zero_grad)#(\w+)\.(step|zero_grad)")
_LOADER = re.compile(
    r"enumerate\(DataLoader\)#_(Single|Multi)Process(ing)?DataLoaderIter\.__next__"
)
_BACKEND = re.compile(r"(nccl|rccl|gloo|mpi|ucc|xccl|oneccl|hccl):\s*(.*)", re.DOTALL)
_PEER = re.compile(r"(->|<-)\s*(\d{1,6})")
_MODULE = re.compile(r"nn\.Module: (.*?)(_\d+)?", re.DOTALL)
_DIGITS = re.compile(r"\d+")
COMMUNICATION = re.compile(r"(nccl|rccl|gloo|mpi|ucc|xccl|oneccl|hccl):|record_param_comms$")
LOADING = re.compile(LOADER_SPAN)
_KNOWN_KINDS = read_sections()["kinds"]
# PyTorch's own names of operations, in addition to the kinds.
OPERATIONS = read_sections()["operations"]
_LOADER_ITERATOR = "_BaseDataLoaderIter"  # wherever it occurs, time counts as data loading
_NAMED = (  # prefix of a name, and its replacement; the first match wins
    (re.compile(r"^enumerate\(DataLoader\)#"), "enumerate(DataLoader)#{}"),
    (re.compile(LOADER_SPAN), "enumerate(SomeDataLoader)#{}"),
    (re.compile(r"^autograd::engine::"), "autograd::engine::{}"),
    (re.compile(r"^Optimizer\.step#"), "Optimizer.step#{}"),
    (re.compile(r"^Optimizer\.zero_grad#"), "Optimizer.zero_grad#{}"),
    (re.compile(r"^Optimizer\."), "Optimizer.{}"),
    (re.compile(r"^_c10d_functional::"), "_c10d_functional::{}"),
    (re.compile(r"^_c10d::"), "_c10d::{}"),
    (re.compile(r"^c10d_functional::"), "c10d_functional::{}"),
    (re.compile(r"^c10d::"), "c10d::{}"),
    (
        re.compile(r"^torch(\.|::)distributed(\.ddp)?(\.|::)reducer"),
        "torch.distributed.ddp.reducer::{}",
    ),
    (re.compile(r"^ProfilerStep"), "ProfilerStep {}"),
    (re.compile(r"^traceloom\.step"), "traceloom.step.{}"),
    (re.compile(r"^traceloom\."), "traceloom.{}"),
    (re.compile(r"^PyTorch Profiler"), "PyTorch Profiler {}"),
    (re.compile(r"^\["), "[{}]"),
)
_WORDS = tuple(
    (re.compile(pattern), word)
    for (_, pattern), word in zip(
        host_events.WORD_PHASE_PATTERNS,
        ("data_load", "forward", "backward", "optimizer"),
        strict=True,
    )
)
_PYTHON = tuple(
    (phase, re.compile(pattern)) for phase, pattern in host_events.PYTHON_PHASE_PATTERNS
)
_PUBLIC_FRAME = re.compile(
    r"(?:^|/)(torch/_tensor\.py\(\d{1,6}\): backward"
    r"|torch/autograd/(?:__init__|graph)\.py\(\d{1,6}\): (?:backward|grad|_engine_run_backward)"
    r"|torch/utils/data/dataloader\.py\(\d{1,6}\): __next__"
    r"|threading\.py\(\d{1,6}\): (?:wait|_wait_for_tstate_lock))$"
)
_COLLECTING = ("Python GC", "<built-in function collect>")  # Python's garbage collection
_BUILT_IN = re.compile(host_events.BLOCKING_PYTHON_PATTERN)
_PHASE_PATHS = {
    host_events.LOADING: "torch/utils/data/{}",
    host_events.BACKWARD: "torch/autograd/graph.py(0): backward",
    host_events.OPTIMIZER: "torch/optim/{}",
    host_events.COMMUNICATION: "torch/distributed/_functional_collectives.py {}",
}
_BLOCKING = re.compile(BLOCKING_CALL_PATTERN)
_BLOCKING_ELSEWHERE = re.compile(host_events.BLOCKING_RUNTIME_PATTERN)
_CALL_WORDS = (
    "Launch",
    "Graph",
    "Memcpy",
    "Memset",
    "Malloc",
    "Free",
    "EventRecord",
    "StreamWaitEvent",
    "Query",
)
_THREAD = re.compile(
    r"python[\d.]{0,8}|pt_main_thread|pt_autograd_\d{1,4}|pt_data_(pin|worker)|stream \d{1,10} *|"
)
_INNER_THREAD = re.compile(r"thread -?\d+ \((.*)\)", re.DOTALL)
_PLAIN_THREAD = re.compile(r"thread -?\d+")
_LANE = re.compile(
    r"Spans|Traces|PyTorch Profiler|__cupti_profiler__|GPU \d{1,3} Counters|GPU \d{1,3}|CPU|"
)


class Pseudonyms:
    """New names by the policy; each distinct name is rewritten once.

    Attributes:
        originals: Pseudonym -> name, for the owner's map.
        kept: Unchanged names that are not public (as the policy demands).
        numbers: Pseudonym -> process or thread, for the owner's map.
    """

    def __init__(self, key: Key, policy: Policy) -> None:
        self._key = key
        self._policy = policy
        self._keep = (
            re.compile("|".join(f"(?:{text})" for text in policy.keep_names))
            if policy.keep_names
            else None
        )
        self._known: dict[tuple[str, str], str] = {}
        self.originals: dict[str, str] = {}
        self.kept: set[str] = set()
        self.numbers: dict[int, int] = {}

    # -- common to all kinds of names -------------------------------------------------------------------------

    def shown(self, kind: str, name: str, make: Callable[[str], str]) -> str:
        """Returns the new name; `kind` keeps names of different kinds apart."""
        remembered = self._known.get((kind, name))
        if remembered is not None:
            return remembered
        if self._keep is not None and self._keep.fullmatch(name):
            new_name = self.keep(name)
        else:
            new_name = make(name)
            if new_name != name:
                self.originals.setdefault(new_name, name)
        self._known[kind, name] = new_name
        return new_name

    def hidden(self) -> set[str]:
        return {name for (_, name), new_name in self._known.items() if new_name != name}

    def unchanged(self) -> set[str]:
        return {name for (_, name), new_name in self._known.items() if new_name == name} - self.kept

    def keep(self, name: str) -> str:
        """Returns a name unchanged that the policy keeps, and notes it in `kept`."""
        self.kept.add(name)
        return name

    def letters(self, text: str) -> str:
        return self._key.letters(text)

    def pseudonym(self, prefix: str, name: str) -> str:
        """Returns `prefix_letters`; names that differ only in digits share the letters and get a
        number as suffix.
        """
        return self.shown(prefix, name, lambda text: self._numbered(prefix, text))

    def _numbered(self, prefix: str, name: str) -> str:
        if _DIGITS.search(name) is None:
            return f"{prefix}_{self._key.letters(name)}"
        return f"{prefix}_{self._key.letters(_DIGITS.sub('#', name))}#{self._key.number(name)}"

    # -- operators, autograd nodes, annotations ---------------------------------------------------------------

    def host(self, name: str) -> str:
        """Returns the new name of an operator or annotation; the same in host traces and device
        traces.
        """
        return self.shown("host", name, self._host)

    def _host(self, name: str) -> str:
        if self._policy.public_names == KEEP and name in list_host_names():
            return name
        if self._policy.names == KEEP:
            return self.keep(name)
        optimizer, backend = _OPTIMIZER.fullmatch(name), _BACKEND.fullmatch(name)
        if (
            name in read_sections()["regions"]
            or STEP.fullmatch(name)
            or _LOADER.fullmatch(name)
            or (optimizer and optimizer[2] in read_sections()["optimizers"])
        ):
            return name
        if name.startswith(_EVALUATE):
            new_name = _EVALUATE + self.host(name[len(_EVALUATE) :])
        elif name.startswith(host_events.SCOPE_PREFIX):
            # All words of phases stay in their part, so that scopes stay nested.
            new_name = host_events.SCOPE_PREFIX + ".".join(
                "".join(
                    [
                        self._numbered("scope", part),
                        *(f" ({word})" for mark, word in _WORDS if mark.search(part)),
                    ]
                )
                for part in name[len(host_events.SCOPE_PREFIX) :].split(".")
            )
        elif name.startswith("nn.Module: "):
            new_name = self._module(name)
        elif backend:  # `nccl:all_reduce`, `gloo:send 0->1`: kind and peer stay
            operation = backend[2]
            peer = _PEER.search(operation)
            base_operation, kind = operation.split(" ", 1)[0], classify_collective(operation)
            if base_operation not in OPERATIONS or classify_collective(base_operation) != kind:
                base_operation = (
                    f"{kind if kind in _KNOWN_KINDS else 'call'}_{self._key.letters(operation)}"
                )
            new_name = f"{backend[1]}:{base_operation}" + (f" {peer[1]}{peer[2]}" if peer else "")
        else:
            new_name = (
                f"op_{self._key.letters(name)}" if "::" in name else self._numbered("region", name)
            )
            new_name = next(
                (template for mark, template in _NAMED if mark.search(name)), "{}"
            ).format(new_name)
            if name.startswith("[") and not new_name.startswith("["):
                new_name = f"[{new_name}]"
            new_name += "".join(
                f" ({word})"
                for mark, word in _WORDS
                if mark.search(name) and not mark.search(new_name)
            )
        return (
            f"{new_name} {_LOADER_ITERATOR}"
            if _LOADER_ITERATOR in name and _LOADER_ITERATOR not in new_name
            else new_name
        )

    def _module(self, name: str) -> str:
        match = _MODULE.fullmatch(name)
        kind, number = (match[1], match[2] or "") if match else (name, "")
        if kind not in read_sections()["modules"] or self._policy.public_names != KEEP:
            kind = f"module_{self._key.letters(kind)}"
        return f"nn.Module: {kind}{'' if self._policy.structure == COLLAPSE else number[:8]}"

    # -- Python frames ----------------------------------------------------------------------------------------

    def python(self, name: str) -> str:
        """Returns the new name of a Python frame or module call."""
        return self.shown("python", name, self._python)

    def _python(self, name: str) -> str:
        if self._policy.stacks == KEEP:
            return self.keep(name)
        if name.startswith("nn.Module: "):
            return self._module(name)
        public = _PUBLIC_FRAME.search(name)
        if public or name in _COLLECTING:
            return public[1] if public else name
        pseudonym = f"python_{self._key.letters(name)}"
        waits = _BUILT_IN.match(name)
        if waits:
            return f"<built-in {waits[1]} {waits[2]} {pseudonym}>"
        phase = next((phase for phase, pattern in _PYTHON if pattern.search(name)), None)
        return _PHASE_PATHS[phase].format(pseudonym) if phase in _PHASE_PATHS else pseudonym

    # -- runtime and driver calls, threads, lanes -------------------------------------------------------------

    def call(self, name: str) -> str:
        return self.shown("call", name, self._call)

    def _call(self, name: str) -> str:
        if name in read_sections()["calls"]:
            return name
        call_words = [word for word in _CALL_WORDS if word in name]
        if "Async" in name:
            call_words.append("Async")
        elif _BLOCKING.search(name) and not call_words:
            call_words.append("Synchronize")
        if _BLOCKING_ELSEWHERE.search(name):
            call_words.append("Synchronize")
        return "_".join([f"call_{self._key.letters(name)}", *call_words])

    def thread(self, name: str) -> str:
        """Returns the new name of a thread or process."""
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
        """Returns the new id of a process or thread that is identified by a text rather than a
        number.
        """
        return self.shown(
            "lane",
            name,
            lambda text: text if _LANE.fullmatch(text) else self._numbered("lane", text),
        )

    def operation(self, text: str) -> str:
        if text in OPERATIONS:
            return text
        kind = classify_collective(text)
        return kind if kind in OPERATIONS else self.pseudonym("collective", text)

    # -- groups, hosts ----------------------------------------------------------------------------------------

    def group(self, name: str) -> str:
        """Returns the new name of a process group; short numbers reveal nothing and are kept, since
        simulators need numbers.
        """
        if self._policy.groups == KEEP or re.fullmatch(r"\d{0,4}", name):
            return name
        if name.isdigit():
            return self.shown("group", name, lambda text: str(self._key.number(text, "group")))
        return self.shown("group", name, lambda text: f"group_{self._key.letters(text)}")

    def description(self, text: str) -> str:
        return text if text in ("default_pg", "undefined", "") else self.group(text)

    def host_name(self, name: str) -> str:
        return self.shown("machine", name, lambda text: f"host_{self._key.letters(text)}")

    def process(self, number: int) -> int:
        """Returns the new id of a process or thread of the operating system; numbers that identify
        no process are kept.
        """
        if number <= 0 or self._policy.processes == KEEP:
            return number
        pseudonym = self._key.number(str(number), "process")
        self.numbers[pseudonym] = number
        return pseudonym

    def pointer(self, number: int) -> int:
        """Returns the new number of a stream, queue or context that is identified by its
        address.
        """
        return (
            number
            if -(1 << 16) < number < 1 << 16 or number in (2**32 - 1, 2**64 - 1)
            else self._key.number(str(number), "pointer")
        )

    def address(self, number: int) -> int:
        """Returns a new memory address: equal ones stay equal, distances are lost."""
        return int.from_bytes(self._key.digest("address", str(number))[:6], "big") if number else 0


# A word by which each rule of kernel_rules.json still matches its kernels; the rest of the name is
# dropped.
MARKS = {
    "nccl": "nccl",
    "rccl": "rccl",
    "hccl": "hccl",
    "oneccl": "oneccl",
    "mscclpp": "msccl",
    "nvshmem": "nvshmem",
    "deep-ep": "ep::",
    "custom-all-reduce": "cross_device_reduce",
    "symmetric-memory": "multimem_",
    "one-two-shot": "one_shot_all_reduce",
    "fused-all-reduce": "lamport_style",
    "quick-reduce": "quick_reduce::",
    "aiter": "aiter::all_gather",
    "rocm-copy": "__amd_rocclr_copy",
    "rocm-fill": "__amd_rocclr_fill",
}
_RULES = tuple(
    (rule.name, re.compile(rule.pattern, re.IGNORECASE)) for rule in load_built_in_category_rules()
)
_KINDS = tuple((kind, re.compile(pattern)) for kind, pattern in KERNEL_KINDS)

# What a kernel computes, by the families in library names; the first match wins.
_FAMILIES = tuple(
    (family, re.compile(pattern, re.IGNORECASE))
    for family, pattern in (
        ("attention", r"flash|fmha|attention|attn|sdpa|\bmha|paged_|_pa_|mla_"),
        ("convolution", r"conv|winograd|fprop|dgrad|wgrad|igemm|implicit_gemm|cudnn::cnn"),
        (
            "gemm",
            r"gemm|gemv|matmul|cijk_|nvjet|cublas|cutlass|splitk|_mm_|\bmm\b|triton_tem|wgmma|ck::.*Gemm|scaled_mm",
        ),
        ("norm", r"norm|bn_fw|bn_bw|welford|GammaBeta"),
        ("softmax", r"softmax|log_sum_exp|cross_entropy|nll_loss"),
        ("embedding", r"embedding|split_embedding|lookup|rotary|rope"),
        ("optimizer", r"multi_tensor|adam|sgd_|adagrad|lamb_"),
        ("random", r"dropout|philox|distribution|random|curand|bernoulli"),
        ("sort", r"sort|topk|scan|cub::|thrust::|unique|histogram"),
        ("reduction", r"reduce|triton_(red|per)|argm(ax|in)|pool|sum_functor|prod_functor"),
        (
            "copy",
            r"copy|memcpy|CatArray|transpose|permute|nchw|nhwc|gather|scatter|index|slice|pad|tril|triu|memset|fill",
        ),
        (
            "elementwise",
            r"elementwise|functor|vectorized|unrolled|triton_poi|relu|gelu|silu|sigmoid|tanh|quant|cast|act",
        ),
    )
)
FAMILIES = tuple(family for family, _ in _FAMILIES)
_KINDS_OF_MEMORY = r"(Pageable|Pinned|Device|Host|Array|Managed|Unknown|Peer)"
_COPY = re.compile(
    rf"Mem(cpy|set)( [HDPM]to[HDPM])?( \({_KINDS_OF_MEMORY}( -> {_KINDS_OF_MEMORY})?\))?"
)
_MEMORY = frozenset(("pageable", "pinned", "device", "host", "array", "managed", "unknown", "peer"))


class KernelNames:
    """New names of kernels, copies and fills."""

    def __init__(self, names: Pseudonyms, policy: Policy) -> None:
        self._names = names
        self._policy = policy

    def kernel(self, name: str) -> str:
        """Returns the new name of a kernel: the mark of its rule, its function, ten letters."""
        return self._names.shown("kernel", name, self._kernel)

    def _kernel(self, name: str) -> str:
        if self._policy.kernels == KEEP:
            return self._names.keep(name)
        suffix = "" if self._policy.structure == COLLAPSE else self._names.letters(name)
        rule = next((rule for rule, pattern in _RULES if pattern.search(name)), None)
        if rule in ("rocm-copy", "rocm-fill"):
            return _join_name(MARKS[rule], "", suffix)
        if rule is not None:
            lower = name.lower()
            kind = next((kind for kind, pattern in _KINDS if pattern.search(lower)), "")
            return _join_name(MARKS[rule], kind, suffix)
        family = next((family for family, pattern in _FAMILIES if pattern.search(name)), "kernel")
        return _join_name(family, "", suffix)

    def copy(self, name: str) -> str:
        """Returns the new name of a copy or fill: its direction and the kinds of memory."""
        return self._names.shown("copy", name, self._copy)

    @staticmethod
    def _copy(name: str) -> str:
        if _COPY.fullmatch(name):
            return name
        kind = copy_kind(name)
        if kind == "fill":
            return "Memset"
        source, target = parse_memory_kinds(name)
        arrow = (
            f" ({source.title()} -> {target.title()})"
            if source in _MEMORY and target in _MEMORY
            else ""
        )
        return f"Memcpy{'' if kind == 'unknown' else f' {kind}'}{arrow}"


_DEEP_EP = {"layout": "get_dispatch_layout"}  # kinds that its kernels spell differently


def _join_name(mark: str, kind: str, suffix: str) -> str:
    """Returns `nccl_all_reduce_letters`: the mark first, so that the same rule matches, then the
    kind.
    """
    if mark == "ep::":
        return f"ep::{_join_name(_DEEP_EP.get(kind or '', kind or 'kernel'), '', suffix)}"
    if kind == "reduce":
        return f"{mark}kernel_reduce_{suffix}"
    return "_".join(part for part in (mark, kind, suffix) if part)

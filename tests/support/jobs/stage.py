"""The program of one rank of a parallel job: its stage's layers, the pipeline's schedule, gradients, optimizer."""

from __future__ import annotations

from collections.abc import Iterator

from support.jobs import kernel_names, program as do
from support.jobs.chance import Shared
from support.jobs.faults import TokenImbalance
from support.jobs.layout import DATA, EXPERT, PIPELINE, TENSOR
from support.jobs.parallel import ParallelRecipe
from support.jobs.writing import (
    COMPUTE,
    FLOAT,
    LONG,
    NUMBER,
    RECEIVE_BACKWARD,
    RECEIVE_FORWARD,
    SEND_BACKWARD,
    SEND_FORWARD,
    STREAMS,
    Op,
    Writer,
)


def programs(recipe: ParallelRecipe) -> list[do.Rank]:
    """The processes of the job."""
    shared = Shared(recipe.seed, recipe.spread)
    groups = recipe.layout.groups()
    return [
        do.Rank(rank, Stage(recipe, rank, shared, groups).threads(), recipe.clock(rank))
        for rank in range(recipe.layout.world_size)
    ]


class Stage(Writer):
    """One rank: its part of every layer of one stage."""

    def threads(self) -> list[list[do.Instruction]]:
        """The instructions of the main thread and, where there is one, of the thread of backward."""
        self.data, self.tensor, self.stage = self.recipe.layout.place(self.rank)
        self._sequence = 0
        self._messages: dict[tuple[int, int], int] = {}
        self.frame("train.py(120): main")
        for step in range(self.recipe.steps):
            self.step = step
            self._step()
        self.out.append(
            do.Synchronize(do.DEVICE, self.call(), self.chance.draw(self.recipe.back_us))
        )
        self.close_frame()
        return [self.main, self.autograd] if self.autograd else [self.main]

    # -- a step -----------------------------------------------------------------------------------------------

    def _step(self) -> None:
        recipe = self.recipe
        self.annotation(f"ProfilerStep#{self.step}")
        self.think(recipe.think_us / 2)
        self.late("step")
        if self.stage in (0, recipe.pipeline - 1):
            self._batch()
        kept: dict[int, list[int]] = {}
        for direction, number in self._order():
            if direction == "F":
                kept[number] = self._forward(number)
            else:
                self._backward(number, kept.pop(number))
            self.extra_sync()
        self._optimizer()
        self.think(recipe.think_us / 2)
        self.close()

    def _order(self) -> Iterator[tuple[str, int]]:
        """Forward and backward passes of the microbatches, in the order of the schedule."""
        count = self.recipe.microbatches
        if self.recipe.schedule == "gpipe":
            yield from (("F", number) for number in range(count))
            yield from (("B", number) for number in range(count))
            return
        ahead = min(self.recipe.pipeline - self.stage - 1, count)
        yield from (("F", number) for number in range(ahead))
        for number in range(count - ahead):
            yield "F", ahead + number
            yield "B", number
        yield from (("B", number) for number in range(count - ahead, count))

    def _batch(self) -> None:
        self.annotation("enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__")
        self.think(15)
        self.close()
        self.out.append(
            do.Begin("aten::copy_", args={"shapes": [[self.recipe.tokens]], "types": [LONG]})
        )
        self.think(self.recipe.op_us / 2)
        self.copy("HtoD (Pinned -> Device)", 6, self.recipe.tokens * 8, blocking=False)
        self.close()

    def _optimizer(self) -> None:
        recipe = self.recipe
        self.late("optimizer")
        if DATA in self.groups:
            self.event("reduced", STREAMS[DATA], COMPUTE)
        self.annotation("Optimizer.step#AdamW.step")
        weights = [[recipe.hidden, recipe.hidden]] * 3
        for _ in range(recipe.layers):
            self.op(
                Op(
                    ("aten::_fused_adamw_",),
                    kernel_names.ADAM,
                    recipe.kernel_us * 0.5,
                    weights,
                    (FLOAT,) * 3,
                )
            )
        self.close()
        if recipe.item:
            self.out += [do.Begin("aten::item"), do.Begin("aten::_local_scalar_dense")]
            self.think(recipe.op_us / 2)
            self.copy("DtoH (Device -> Pageable)", 1.2, 4, blocking=True)
            self.out.append(
                do.Synchronize(do.STREAM, self.call(0.5), self.chance.draw(recipe.back_us), COMPUTE)
            )
            self.think(recipe.op_us / 4)
            self.out += [do.End(), do.End()]

    # -- messages ---------------------------------------------------------------------------------------------

    def _receive(self, other: int, stream: int) -> None:
        """From a neighbouring stage; compute waits for it."""
        way = (self._of_stage(other), self.rank)
        self.message("recv", way, stream, self._next_message(way))
        self.event("received", stream, COMPUTE)

    def _send(self, other: int, stream: int) -> None:
        way = (self.rank, self._of_stage(other))
        self.message("send", way, stream, self._next_message(way))

    def _of_stage(self, stage: int) -> int:
        return self.groups[PIPELINE].ranks[stage]

    def _next_message(self, way: tuple[int, int]) -> int:
        self._messages[way] = self._messages.get(way, 0) + 1
        return self._messages[way]

    # -- forward ----------------------------------------------------------------------------------------------

    def _forward(self, number: int) -> list[int]:
        """One microbatch forward; gives the autograd numbers of its layers."""
        recipe = self.recipe
        self.annotation(f"forward microbatch {number}")
        if self.stage:
            self._receive(self.stage - 1, RECEIVE_FORWARD)
        else:
            self._embed()
        numbers = []
        for layer in range(recipe.layers):
            if recipe.sharded and not number:
                weights = 12 * recipe.hidden**2 // recipe.tensor
                self.collective("_allgather_base", DATA, weights // recipe.data, 1.5, weights)
                self.event("gathered", STREAMS[DATA], COMPUTE) if DATA in self.groups else None
            self._sequence += 1
            numbers.append(self._sequence)
            self.frame(f"nn.Module: TransformerLayer_{self.stage * recipe.layers + layer}")
            self._layer(layer, self._sequence)
            self.close_frame()
        if self.stage + 1 < recipe.pipeline:
            self._send(self.stage + 1, SEND_FORWARD)
        else:
            self._loss()
        self.close()
        return numbers

    def _embed(self) -> None:
        recipe = self.recipe
        label, factor = self.shard_factor()
        shapes = [[50_304 // recipe.tensor, recipe.hidden], [max(round(factor), 1), recipe.tokens]]
        self.op(
            Op(
                ("aten::embedding", "aten::index_select"),
                kernel_names.EMBED,
                recipe.kernel_us * 0.4,
                shapes,
                ("c10::BFloat16", LONG),
                label=label,
                factor=factor,
            )
        )

    def _loss(self) -> None:
        logits = [[self.recipe.tokens, self.recipe.hidden]]
        self.op(
            Op(
                ("aten::log_softmax", "aten::_log_softmax"),
                kernel_names.SOFTMAX,
                self.recipe.kernel_us * 0.3,
                logits,
                (FLOAT,),
            )
        )

    def _layer(self, layer: int, sequence: int) -> None:
        """Attention, then the feed-forward part; tensor ranks add up what each has after both."""
        recipe = self.recipe
        n, h, part = recipe.tokens, recipe.hidden, recipe.hidden // recipe.tensor
        self.capture()
        self._norm(sequence)
        self._product(n, h, 3 * part, sequence)
        heads = [1, recipe.heads // recipe.tensor or 1, n, h // recipe.heads]
        chain = (
            "aten::scaled_dot_product_attention",
            "aten::_scaled_dot_product_flash_attention",
            "aten::_flash_attention_forward",
        )
        self.op(Op(chain, kernel_names.flash("fwd", "fwd"), self._us(0.8), [heads] * 3), sequence)
        self._product(n, part, h, sequence)
        self.replay(f"attention {layer}")
        self._sum_up()
        self.capture()
        self._pointwise("aten::add", "CUDAFunctor_add<c10::BFloat16>")
        self._norm(sequence)
        if recipe.expert > 1:
            self.replay(f"norm {layer}")
            self._experts(sequence)
        else:
            self._product(n, h, 4 * part, sequence)
            self._pointwise("aten::gelu", "GeluCUDAKernelImpl")
            self._product(n, 4 * part, h, sequence)
            self.replay(f"feed forward {layer}")
            self._sum_up()
        self._pointwise("aten::add", "CUDAFunctor_add<c10::BFloat16>")

    def _norm(self, sequence: int | None = None) -> None:
        shape = [
            [self.recipe.tokens, self.recipe.hidden],
            [],
            [self.recipe.hidden],
            [self.recipe.hidden],
            [],
        ]
        types = ("c10::BFloat16", "ScalarList", "c10::BFloat16", "c10::BFloat16", NUMBER)
        op = Op(
            ("aten::layer_norm", "aten::native_layer_norm"),
            kernel_names.NORM,
            self.recipe.kernel_us * 0.15,
            shape,
            types,
            small=True,
        )
        self.op(op, sequence)

    def _pointwise(self, name: str, functor: str) -> None:
        shape = [[self.recipe.tokens, self.recipe.hidden]] * 2
        kernel = kernel_names.pointwise(functor)
        self.op(Op((name,), kernel, self.recipe.kernel_us * 0.12, shape, small=True))

    def _product(self, rows: int, inner: int, columns: int, sequence: int) -> None:
        """A linear layer."""
        us = self._us(inner * columns * self.recipe.tensor / self.recipe.hidden**2)
        names = ("aten::linear", "aten::matmul", "aten::mm")
        self.op(
            Op(names, kernel_names.product("tn"), us, [[rows, inner], [inner, columns]]), sequence
        )

    def _us(self, share: float) -> float:
        """The tensor ranks share the work of a layer."""
        return self.recipe.kernel_us * share / self.recipe.tensor

    def _sum_up(self) -> None:
        if TENSOR in self.groups:
            self.collective("allreduce", TENSOR, self.recipe.tokens * self.recipe.hidden)
            self.event("summed", STREAMS[TENSOR], COMPUTE)

    # -- experts ----------------------------------------------------------------------------------------------

    def shares(self) -> tuple[str, list[float]]:
        """Label, and the part of all tokens that each place of the expert group gets."""
        count = self.recipe.expert
        for fault in self.recipe.faults:
            if isinstance(fault, TokenImbalance):
                return fault.label, [share / sum(fault.shares) for share in fault.shares]
        return "", [1 / count] * count

    def tokens_to(self) -> list[int]:
        """Tokens that each rank sends to each place of its expert group, in one microbatch of one layer."""
        total = self.recipe.tokens * self.recipe.top_experts
        _, shares = self.shares()
        counts = [int(total * share) for share in shares]
        counts[-1] += total - sum(counts)
        return counts

    def _experts(self, sequence: int, *, backward: bool = False) -> None:
        """Tokens go to their experts, are worked on there, and come back."""
        group = self.groups.get(EXPERT)
        if group is None:
            return
        recipe, index = self.recipe, group.ranks.index(self.rank)
        label, shares = self.shares()
        sent = tuple(count * recipe.hidden for count in self.tokens_to())
        got = (sent[index],) * recipe.expert
        longer = (label, max(shares) * recipe.expert)
        self._exchange(sent, got, longer)
        tokens = sum(got) // recipe.hidden
        shapes = [[tokens, recipe.hidden], [1, recipe.hidden, 4 * recipe.hidden]]
        factor = shares[index] * recipe.expert
        for _ in range(4 if backward else 2):
            op = Op(
                ("aten::_grouped_mm",),
                kernel_names.GROUPED,
                recipe.kernel_us * 2,
                shapes,
                label=label,
                factor=factor,
            )
            self.op(op, sequence, backward=backward)
        self._exchange(got, sent, longer)

    def _exchange(
        self, sent: tuple[int, ...], got: tuple[int, ...], longer: tuple[str, float]
    ) -> None:
        self.collective("all_to_allv", EXPERT, sum(sent), 0.8, sum(got), (sent, got), longer)
        self.event("exchanged", STREAMS[EXPERT], COMPUTE)

    # -- backward ---------------------------------------------------------------------------------------------

    def _backward(self, number: int, numbers: list[int]) -> None:
        recipe = self.recipe
        self.annotation(f"backward microbatch {number}")
        if number == 0:
            self.late("backward")
        if self.stage + 1 < recipe.pipeline:
            self._receive(self.stage + 1, RECEIVE_BACKWARD)
        if recipe.autograd:
            self.think(3)
            self.main.append(do.Post(f"backward {self.step} {number}"))
            self.autograd.append(do.Await(f"backward {self.step} {number}", self.chance.draw(8)))
            self.out = self.autograd
        for layer in reversed(range(recipe.layers)):
            self._layer_back(numbers[layer])
            if number == recipe.microbatches - 1:
                self._reduce()
        if recipe.autograd:
            self.autograd.append(do.Post(f"done {self.step} {number}"))
            self.main.append(do.Await(f"done {self.step} {number}", self.chance.draw(9)))
            self.out = self.main
            self.think(3)
        if self.stage:
            self._send(self.stage - 1, SEND_BACKWARD)
        self.close()

    def _reduce(self) -> None:
        """The gradients of a layer, when its last microbatch is done."""
        weights = 12 * self.recipe.hidden**2 // self.recipe.tensor
        if self.recipe.sharded:
            self.collective("_reduce_scatter_base", DATA, weights, 1.5, weights // self.recipe.data)
        else:
            self.collective("allreduce", DATA, weights, 2.0)

    def _layer_back(self, sequence: int) -> None:
        recipe = self.recipe
        n, h, part = recipe.tokens, recipe.hidden, recipe.hidden // recipe.tensor
        self._node("AddBackward0", sequence)
        if recipe.expert > 1:
            self._experts(sequence, backward=True)
        else:
            self._product_back(n, 4 * part, h, sequence)
            gelu = kernel_names.pointwise("GeluBackwardCUDAKernelImpl")
            names = ("GeluBackward0", "aten::gelu_backward")
            self.op(
                Op(names, gelu, recipe.kernel_us * 0.15, [[n, h]] * 2, small=True),
                sequence,
                backward=True,
            )
            self._product_back(n, h, 4 * part, sequence)
            self._sum_up()
        self._norm_back(sequence)
        self.close()
        self._node("ScaledDotProductFlashAttentionBackward0", sequence)
        self._product_back(n, part, h, sequence)
        heads = [1, recipe.heads // recipe.tensor or 1, n, h // recipe.heads]
        chain = (
            "aten::_scaled_dot_product_flash_attention_backward",
            "aten::_flash_attention_backward",
        )
        self.op(
            Op(chain, kernel_names.flash("bwd_dq_dk_dv_loop", "bwd"), self._us(2.0), [heads] * 4),
            sequence,
            backward=True,
        )
        self._product_back(n, h, 3 * part, sequence)
        self._sum_up()
        self._norm_back(sequence)
        self.close()

    def _node(self, name: str, sequence: int) -> None:
        args = {"sequence": sequence, "forward_thread": 1}
        self.out.append(do.Begin(f"autograd::engine::evaluate_function: {name}", args=args))

    def _product_back(self, rows: int, inner: int, columns: int, sequence: int) -> None:
        """Gradients of input and weight."""
        us = self._us(inner * columns * self.recipe.tensor / self.recipe.hidden**2)
        for kind, shapes in (
            ("nn", [[rows, columns], [columns, inner]]),
            ("nt", [[inner, rows], [rows, columns]]),
        ):
            self.op(
                Op(("MmBackward0", "aten::mm"), kernel_names.product(kind), us, shapes),
                sequence,
                backward=True,
            )

    def _norm_back(self, sequence: int) -> None:
        shape = [[self.recipe.tokens, self.recipe.hidden]] * 2
        op = Op(
            ("NativeLayerNormBackward0", "aten::native_layer_norm_backward"),
            kernel_names.NORM_BACK,
            self.recipe.kernel_us * 0.25,
            shape,
            small=True,
        )
        self.op(op, sequence, backward=True)

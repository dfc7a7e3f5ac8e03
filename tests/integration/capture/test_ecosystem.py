"""Programs as people write them, with the packages they use: recorded, they print what they print, and steps are right."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import traceloom

pytestmark = pytest.mark.torch


class Program(NamedTuple):
    """What is run, and what is true of it.

    Attributes:
        text: The script.
        steps: Whole steps of each recorded process.
        source: What makes them.
        needs: Packages of the dependency group `ecosystem`.
        ranks: Started by torchrun where there are several.
        spawned: Ranks that the script starts itself.
    """

    text: str
    steps: int
    source: str = "optimizer"
    needs: tuple[str, ...] = ()
    ranks: int = 1
    spawned: int = 0


MODEL = """
import os, torch
torch.manual_seed(0)
torch.set_num_threads(1)
def net(width=16):
    return torch.nn.Sequential(torch.nn.Linear(width, 32), torch.nn.ReLU(), torch.nn.Linear(32, width))
"""

RANKS = """
import torch.distributed as dist
dist.init_process_group("gloo")
model = net()
{wrap}
optimizer = torch.optim.AdamW(model.parameters(), foreach={foreach})
for number in range(9):
    loss = model(torch.ones(4, 16) * (number + dist.get_rank())).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
if dist.get_rank() == 0: print(f"{{loss.item():.4f}}", flush=True)
dist.destroy_process_group()
"""
DDP = (
    "from torch.nn.parallel import DistributedDataParallel\nmodel = DistributedDataParallel(model)"
)
FSDP2 = """from torch.distributed.fsdp import fully_shard
from torch.distributed.device_mesh import init_device_mesh
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
for layer in model: fully_shard(layer, mesh=mesh)
fully_shard(model, mesh=mesh)"""

PROGRAMS = {
    "Trainer of transformers with accumulation and checkpointing": Program(
        """
        import torch
        from transformers import GPT2Config, GPT2LMHeadModel, PrinterCallback, Trainer, TrainingArguments, set_seed
        set_seed(0)
        config = GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2)
        tokens = torch.arange(16) % 64
        data = [{"input_ids": tokens, "labels": tokens} for _ in range(64)]
        arguments = TrainingArguments(
            "out", max_steps=12, per_device_train_batch_size=2, gradient_accumulation_steps=2,
            gradient_checkpointing=True, use_cpu=True, report_to="none", save_strategy="no", disable_tqdm=True,
            logging_strategy="no",
        )
        trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=data)
        trainer.remove_callback(PrinterCallback)  # it prints how long it took
        result = trainer.train()
        print(trainer.state.global_step, f"{result.training_loss:.3f}")
        """,
        steps=12,
        needs=("transformers", "accelerate"),
    ),
    "Accelerate on two ranks": Program(
        MODEL
        + """
from accelerate import Accelerator
accelerator = Accelerator(cpu=True)
data = torch.utils.data.DataLoader(torch.ones(72, 16), batch_size=4)
model = net()
model, optimizer, data = accelerator.prepare(model, torch.optim.SGD(model.parameters(), 0.1), data)
for batch in data:
    loss = model(batch).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
accelerator.print(f"{loss.item():.4f}")
accelerator.end_training()
""",
        steps=9,
        needs=("accelerate",),
        ranks=2,
    ),
    "Lightning with spawned ranks and loader workers": Program(
        """
        import logging, warnings, torch
        warnings.simplefilter("ignore")
        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        import lightning
        class Task(lightning.LightningModule):
            def __init__(self):
                super().__init__()
                self.net = torch.nn.Linear(16, 16)
            def training_step(self, batch, _): return self.net(batch).square().mean()
            def configure_optimizers(self): return torch.optim.SGD(self.parameters(), 0.1)
        if __name__ == "__main__":
            lightning.seed_everything(0, verbose=False)
            data = torch.utils.data.DataLoader(torch.ones(80, 16), batch_size=4, num_workers=1)
            trainer = lightning.Trainer(
                accelerator="cpu", devices=2, strategy="ddp_spawn", max_steps=10, logger=False,
                enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, barebones=False,
            )
            trainer.fit(Task(), data)
            print("steps", trainer.global_step)
        """,
        steps=10,
        needs=("lightning",),
        spawned=2,
    ),
    "DDP on four ranks": Program(MODEL + RANKS.format(wrap=DDP, foreach=True), steps=9, ranks=4),
    "FSDP2 on two ranks": Program(
        MODEL + RANKS.format(wrap=FSDP2, foreach=False), steps=9, ranks=2
    ),
    "FSDP2 on four ranks": Program(
        MODEL + RANKS.format(wrap=FSDP2, foreach=False), steps=9, ranks=4
    ),
    "a compiled model": Program(
        MODEL
        + """
model = torch.compile(net(), backend="aot_eager")
optimizer = torch.optim.Adam(model.parameters())
for _ in range(12):
    loss = model(torch.ones(4, 16)).square().mean()
    loss.backward(); optimizer.step(); optimizer.zero_grad()
print(f"{loss.item():.4f}")
""",
        steps=12,
    ),
    "a loop as in nanoGPT": Program(
        MODEL
        + """
model, iteration = net(), 0
optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95))
@torch.no_grad()
def estimate_loss():
    model.eval()
    losses = [model(torch.ones(4, 16)).square().mean().item() for _ in range(3)]
    model.train()
    return sum(losses) / 3
while True:
    for group in optimizer.param_groups: group["lr"] = 1e-3 / (iteration + 1)
    if iteration % 5 == 0: print(f"step {iteration}: {estimate_loss():.4f}")
    for micro in range(4):
        with torch.autocast("cpu", torch.bfloat16): loss = model(torch.ones(4, 16)).square().mean() / 4
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    iteration += 1
    if iteration > 11: break
""",
        steps=12,
    ),
    "a GAN": Program(
        MODEL
        + """
generator, critic = net(), torch.nn.Linear(16, 1)
of_generator = torch.optim.Adam(generator.parameters())
of_critic = torch.optim.Adam(critic.parameters())
for _ in range(10):
    fake = generator(torch.ones(4, 16))
    of_critic.zero_grad()
    (critic(fake.detach()).mean() - critic(torch.zeros(4, 16)).mean()).backward()
    of_critic.step()
    of_generator.zero_grad()
    (-critic(fake).mean()).backward()
    of_generator.step()
print(f"{fake.sum().item():.4f}")
""",
        steps=10,
    ),
    "LBFGS": Program(
        MODEL
        + """
model = net()
optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
def closure():
    optimizer.zero_grad()
    loss = model(torch.ones(4, 16)).square().mean()
    loss.backward()
    return loss
for _ in range(10): loss = optimizer.step(closure)
print(f"{loss.item():.4f}")
""",
        steps=10,
    ),
}


def _skip_without(names: tuple[str, ...]) -> None:
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{', '.join(missing)} not installed: pip install --group ecosystem")


# Others of their kind are tried each time; these take longest.
SELDOM = (
    "Trainer of transformers with accumulation and checkpointing",
    "a loop as in nanoGPT",
    "LBFGS",
    "FSDP2 on two ranks",
    "FSDP2 on four ranks",
    "Accelerate on two ranks",
    "Lightning with spawned ranks and loader workers",
    "a compiled model",
    "a GAN",
)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.thorough) if name in SELDOM else name
        for name in PROGRAMS
    ],
)
def test_a_program_of_the_ecosystem_is_recorded_and_left_alone(recorder: Any, name: str) -> None:
    program = PROGRAMS[name]
    _skip_without(program.needs)
    script = recorder.script(program.text, train=False)
    command = (
        [sys.executable, script] if program.ranks == 1 else recorder.torchrun(script, program.ranks)
    )
    run = recorder.record(command)
    assert run.code == 0, run.err
    if program.ranks > 2:  # alone they take as long again; what they print is known
        assert re.fullmatch(r"\d\.\d{4}\n", run.out)
    else:
        assert recorder.plain(command).out == run.out
    ranks = program.spawned or program.ranks
    parts = run.capture["ranks"]
    assert [(part["rank"], part["world_size"]) for part in parts] == [
        (rank, ranks) for rank in range(ranks)
    ]
    assert {part["step_source"] for part in parts} == {program.source}
    assert {len(part["steps"]["start_ns"]) for part in parts} == {program.steps}
    for part in parts:
        states = part["steps"]["state"]
        assert states.count("recorded") == part["window"]["step_count"] >= 3
    session = traceloom.load(run.directory, cache=False)
    assert session.ranks == tuple(range(ranks))


def test_a_server_with_threads_is_recorded_on_all_of_them(recorder: Any) -> None:
    text = (
        MODEL
        + """
import threading, urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
model = net()
class Answer(BaseHTTPRequestHandler):
    def do_GET(self):
        with torch.inference_mode(): body = f"{model(torch.ones(2, 16)).sum().item():.4f}".encode()
        self.send_response(200); self.end_headers(); self.wfile.write(body)
    def log_message(self, *_): pass
server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
threading.Thread(target=server.serve_forever).start()
answers = {urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}").read() for _ in range(40)}
server.shutdown()
print(answers)
"""
    )
    script = recorder.script(text, train=False)
    plain, run = recorder.plain([sys.executable, script]), recorder.record([sys.executable, script])
    assert (run.code, run.out) == (plain.code, plain.out) == (0, plain.out), run.err
    assert run.names().count("aten::linear") == 2 * 40
    assert len({event["tid"] for event in run.events() if event["name"] == "aten::linear"}) > 1


@pytest.mark.thorough
def test_a_notebook_is_recorded_in_its_kernel(recorder: Any) -> None:
    _skip_without(("ipykernel", "nbclient", "nbformat"))
    cell = MODEL + (
        "model = net()\noptimizer = torch.optim.SGD(model.parameters(), 0.1)\nfor _ in range(9):\n"
        "    loss = model(torch.ones(4, 16)).square().mean(); loss.backward(); optimizer.step(); optimizer.zero_grad()\n"
        "print(f'{loss.item():.4f}')"
    )
    script = recorder.script(
        f"""
        import sys, nbclient, nbformat
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell({cell!r})])
        kernel = nbclient.NotebookClient(notebook, timeout=200)
        kernel.create_kernel_manager().kernel_spec.argv[0] = sys.executable
        kernel.execute()
        print(notebook.cells[0].outputs)
        """,
        train=False,
    )
    command = [sys.executable, script]
    plain, run = recorder.plain(command), recorder.record(command)
    assert plain.code == 0, plain.err
    assert (run.code, run.out) == (0, plain.out), run.err
    (part,) = run.capture["ranks"]
    assert (part["rank"], part["job"], len(part["steps"]["start_ns"])) == (0, None, 9)
    assert Path(part["window"]["file"]).name.endswith(".kineto.json.gz")

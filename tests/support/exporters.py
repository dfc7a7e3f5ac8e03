"""Exporters over a real HTTP server on the loopback: their texts as they print them, and servers that misbehave."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

_A100 = 'gpu="0",UUID="GPU-aaaa",device="nvidia0",modelName="NVIDIA A100-SXM4-80GB",Hostname="n1"'
_MIG = _A100.replace(",Hostname", ',GPU_I_PROFILE="3g.40gb",GPU_I_ID="2",Hostname')
DCGM_3 = f"""\
# HELP DCGM_FI_DEV_SM_CLOCK SM clock frequency (in MHz).
# TYPE DCGM_FI_DEV_SM_CLOCK gauge
DCGM_FI_DEV_SM_CLOCK{{{_A100},container="trainer",namespace="ml",pod="train-0"}} 1410
# TYPE DCGM_FI_DEV_POWER_USAGE gauge
DCGM_FI_DEV_POWER_USAGE{{{_A100}}} 287.43
# TYPE DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION counter
DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION{{{_A100}}} 5000000
# TYPE DCGM_FI_DEV_GPU_UTIL gauge
DCGM_FI_DEV_GPU_UTIL{{{_A100}}} 97
# TYPE DCGM_FI_DEV_FB_USED gauge
DCGM_FI_DEV_FB_USED{{{_A100}}} 1024
# TYPE DCGM_FI_DEV_XID_ERRORS gauge
DCGM_FI_DEV_XID_ERRORS{{{_A100}}} 0
# TYPE DCGM_FI_DEV_MEMORY_TEMP gauge
DCGM_FI_DEV_MEMORY_TEMP{{{_A100}}} 9223372036854775794
# TYPE DCGM_FI_PROF_PIPE_TENSOR_ACTIVE gauge
DCGM_FI_PROF_PIPE_TENSOR_ACTIVE{{{_A100}}} 0.25
# TYPE DCGM_FI_PROF_GR_ENGINE_ACTIVE gauge
DCGM_FI_PROF_GR_ENGINE_ACTIVE{{{_A100}}} 0.5
# TYPE DCGM_FI_PROF_PCIE_TX_BYTES counter
DCGM_FI_PROF_PCIE_TX_BYTES{{{_A100}}} 123456
DCGM_FI_DEV_FB_USED{{{_MIG},hpc_job="4242"}} 512
# TYPE go_goroutines gauge
go_goroutines 11
"""

_H100 = (
    'gpu="1",UUID="GPU-bbbb",pci_bus_id="00000000:1B:00.0",device="nvidia1",modelName="NVIDIA H100 80GB HBM3",'
    'Hostname="n2",DCGM_FI_DRIVER_VERSION="580.65.06"'
)
# Name of DCGM 4.6 after the prefix: its value, and what that is of ours.
DCGM_4_SERIES = {
    "DEV_SM_CLOCK_HERTZ": ("1500000000", "gpu_clock_hertz", ("sm",), 1.5e9),
    "DEV_MEMORY_CLOCK_HERTZ": ("2619000000", "gpu_clock_hertz", ("memory",), 2.619e9),
    "DEV_GPU_ENERGY_JOULES_TOTAL": ("77", "gpu_energy_joules_total", (), 77.0),
    "DEV_GPU_UTIL_RATIO": ("97", "gpu_busy_ratio", (), 0.97),
    "DEV_XID_ERROR": ("79", "gpu_last_xid", (), 79.0),
    "DEV_PCIE_REPLAY_TOTAL": ("3", "gpu_errors_total", ("pcie-replay", ""), 3.0),
    "DEV_ECC_SBE_AGG_TOTAL": ("4", "gpu_errors_total", ("ecc-corrected", ""), 4.0),
    "DEV_ECC_DBE_AGG_TOTAL": ("5", "gpu_errors_total", ("ecc-uncorrected", ""), 5.0),
    "DEV_ROW_REMAP_CORRECTABLE_TOTAL": ("6", "gpu_remapped_rows", ("correctable",), 6.0),
    "DEV_ROW_REMAP_UNCORRECTABLE_TOTAL": ("7", "gpu_remapped_rows", ("uncorrectable",), 7.0),
    "DEV_ROW_REMAP_PENDING": ("1", "gpu_remapped_rows", ("pending",), 1.0),
    "DEV_ROW_REMAP_FAILED": ("0", "gpu_remapped_rows", ("failure",), 0.0),
    "PROF_GR_ENGINE_UTIL_RATIO": ("0.95", "gpu_graphics_active_ratio", (), 0.95),
    "PROF_SM_UTIL_RATIO": ("0.9", "gpu_sm_active_ratio", (), 0.9),
    "PROF_SM_OCCUPANCY_RATIO": ("0.35", "gpu_sm_occupancy_ratio", (), 0.35),
    "PROF_DRAM_UTIL_RATIO": ("0.3", "gpu_dram_active_ratio", (), 0.3),
    "PROF_TENSOR_UTIL_RATIO": ("0.5", "gpu_pipe_active_ratio", ("tensor",), 0.5),
    "PROF_HMMA_UTIL_RATIO": ("0.4", "gpu_pipe_active_ratio", ("hmma",), 0.4),
    "PROF_IMMA_UTIL_RATIO": ("0.1", "gpu_pipe_active_ratio", ("imma",), 0.1),
    "PROF_DFMA_UTIL_RATIO": ("0.01", "gpu_pipe_active_ratio", ("dfma",), 0.01),
    "PROF_FP64_UTIL_RATIO": ("0", "gpu_pipe_active_ratio", ("fp64",), 0.0),
    "PROF_FP32_UTIL_RATIO": ("0.02", "gpu_pipe_active_ratio", ("fp32",), 0.02),
    "PROF_INT_UTIL_RATIO": ("0.03", "gpu_pipe_active_ratio", ("int",), 0.03),
    "PROF_SM_CYCLES_ELAPSED_TOTAL": ("1084", "gpu_cycles_total", ("elapsed",), 1084.0),
    "PROF_SM_CYCLES_ACTIVE_TOTAL": ("1085", "gpu_cycles_total", ("active",), 1085.0),
    "PROF_MMA_CYCLES_ACTIVE_TOTAL": ("1086", "gpu_cycles_total", ("tensor",), 1086.0),
    "PROF_DMMA_CYCLES_ACTIVE_TOTAL": ("1087", "gpu_cycles_total", ("dmma",), 1087.0),
    "PROF_HMMA_CYCLES_ACTIVE_TOTAL": ("1088", "gpu_cycles_total", ("hmma",), 1088.0),
    "PROF_IMMA_CYCLES_ACTIVE_TOTAL": ("1089", "gpu_cycles_total", ("imma",), 1089.0),
    "PROF_DFMA_CYCLES_ACTIVE_TOTAL": ("1090", "gpu_cycles_total", ("dfma",), 1090.0),
    "PROF_PCIE_TX_BYTES_TOTAL": ("1091", "gpu_link_bytes_total", ("pcie", "transmit"), 1091.0),
    "PROF_PCIE_RX_BYTES_TOTAL": ("1092", "gpu_link_bytes_total", ("pcie", "receive"), 1092.0),
    "PROF_INT_CYCLES_ACTIVE_TOTAL": ("1093", "gpu_cycles_total", ("int",), 1093.0),
    "PROF_FP64_CYCLES_ACTIVE_TOTAL": ("1094", "gpu_cycles_total", ("fp64",), 1094.0),
    "PROF_FP32_CYCLES_ACTIVE_TOTAL": ("1095", "gpu_cycles_total", ("fp32",), 1095.0),
    "PROF_FP16_CYCLES_ACTIVE_TOTAL": ("1096", "gpu_cycles_total", ("fp16",), 1096.0),
}
DCGM_4 = "".join(
    f"# TYPE DCGM_FI_{name} {'counter' if name.endswith('_TOTAL') else 'gauge'}\nDCGM_FI_{name}{{{_H100}}} {value[0]}\n"
    for name, value in {
        **DCGM_4_SERIES,
        "PROF_FP16_UTIL_RATIO": ("140737488355328",),
    }.items()  # FP16: no value
)

_MI300X = (
    'card_model="102-G30211-0C",card_series="AMD Instinct MI300X OAM",card_vendor="AMD",driver_version="6.12.12",'
    'gpu_compute_partition_type="spx",gpu_id="2",gpu_memory_partition_type="nps1",gpu_partition_id="0",'
    'gpu_uuid="ccff74a1-0000-1000-80e0-c6d49f5b0d86",hostname="tw038",namespace="",pod="",serial_number="692409005408",'
    'job_id="8",job_user="ada",job_partition="gpu"'
)
_DIVIDED = (
    _MI300X.replace('"spx"', '"cpx"')
    .replace('gpu_id="2"', 'gpu_id="47"')
    .replace('_id="0"', '_id="5"')
)
AMD = f"""\
# TYPE gpu_gfx_activity gauge
gpu_gfx_activity{{{_MI300X}}} 88
gpu_gfx_activity{{{_DIVIDED}}} 12
# TYPE gpu_umc_activity gauge
gpu_umc_activity{{{_MI300X}}} 30
# TYPE gpu_package_power gauge
gpu_package_power{{{_MI300X}}} 640
# TYPE gpu_power_usage gauge
gpu_power_usage{{{_MI300X}}} 1
# TYPE gpu_energy_consumed gauge
gpu_energy_consumed{{{_MI300X}}} 5e6
# TYPE gpu_used_vram gauge
gpu_used_vram{{{_MI300X}}} 2048
# TYPE gpu_total_vram gauge
gpu_total_vram{{{_MI300X}}} 196592
# TYPE gpu_clock gauge
gpu_clock{{clock_index="0",clock_type="GPU_CLOCK_TYPE_SYSTEM",{_MI300X}}} 2100
gpu_clock{{clock_index="1",clock_type="GPU_CLOCK_TYPE_SYSTEM",{_MI300X}}} 132
gpu_clock{{clock_index="8",clock_type="GPU_CLOCK_TYPE_MEMORY",{_MI300X}}} 1300
# TYPE gpu_junction_temperature gauge
gpu_junction_temperature{{{_MI300X}}} 71
# TYPE gpu_ecc_uncorrect_total gauge
gpu_ecc_uncorrect_total{{{_MI300X}}} 4
# TYPE gpu_ecc_correct_total gauge
gpu_ecc_correct_total{{{_MI300X}}} 9
# TYPE pcie_replay_count gauge
pcie_replay_count{{{_MI300X}}} 2
# TYPE gpu_edge_temperature gauge
gpu_edge_temperature{{{_MI300X}}} 50
# TYPE gpu_memory_temperature gauge
gpu_memory_temperature{{{_MI300X}}} 60
# TYPE gpu_free_vram gauge
gpu_free_vram{{{_MI300X}}} 1024
"""

_TPU = 'accelerator_id="1234567890123456789-4",make="cloud-tpu",model="tpu-v6e-slice",tpu_topology="2x2"'
_OTHER_TPU = _TPU.replace("-4", "-0")
TPU = f"""\
# TYPE duty_cycle_node gauge
duty_cycle_node{{{_TPU}}} 42
duty_cycle_node{{{_OTHER_TPU}}} 0
# TYPE duty_cycle gauge
duty_cycle{{{_TPU},container="vllm-worker",namespace="ml",pod="serve-0"}} 42
# TYPE tensorcore_utilization_node gauge
tensorcore_utilization_node{{{_TPU}}} 25
# TYPE memory_bandwidth_utilization_node gauge
memory_bandwidth_utilization_node{{{_TPU}}} 11
# TYPE memory_used gauge
memory_used{{{_TPU}}} 1.5e10
# TYPE memory_total gauge
memory_total{{{_TPU}}} 3.2e10
"""

Answer = Callable[[BaseHTTPRequestHandler], None]


def text(body: str) -> Answer:
    """An exporter that says this."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("Content-Type", "text/plain; version=0.0.4")
        handler.end_headers()
        handler.wfile.write(body.encode())

    return answer


class Exporter:
    """A server on the loopback; `answer` may be set to another behaviour at any time."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.paths: list[str] = []
        self.released = threading.Event()
        exporter = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                exporter.paths.append(self.path)
                try:
                    exporter.answer(self)
                except OSError:  # the client has gone
                    self.close_connection = True

            def log_message(self, *_: object) -> None:
                """Nothing on the standard error of tests."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self.server.server_port}/metrics"


@contextmanager
def serving(answer: Answer) -> Iterator[Exporter]:
    """An exporter that runs until the block ends."""
    exporter = Exporter(answer)
    thread = threading.Thread(target=exporter.server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield exporter
    finally:
        exporter.released.set()
        exporter.server.shutdown()
        exporter.server.server_close()
        thread.join()

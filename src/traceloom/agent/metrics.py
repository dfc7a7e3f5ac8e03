"""Every metric of the agent, declared once: its name, unit, labels, and what others call it.

Names, units and kinds follow OpenMetrics 1.0; `opentelemetry` names are those of the semantic conventions of 2026
(`system.*`, `process.*`, `hw.*`) where they have one, else `traceloom.*`; `dcgm` are the fields of dcgm-exporter that
boards ask for. docs/reference/agent-metrics.md is made of this.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

PREFIX = "traceloom_"
MetricKind = Literal["gauge", "counter", "histogram", "info"]
# How a value of a device becomes one of its jobs: `sum` is split by use of the device (and adds up), `mean` is a
# property that every job on the device sees.
Aggregation = Literal["sum", "mean", ""]


class Reading(NamedTuple):
    """One value that was just measured.

    `labels` are the values of the metric's labels, in their order; "" for one that is not known. What could not be
    measured has no reading: it is absent, never 0.
    """

    metric: str
    labels: tuple[str, ...]
    value: float


class HistogramReading(NamedTuple):
    """A reading of a histogram: how many values were at most each bound, cumulated; their number and total."""

    metric: str
    labels: tuple[str, ...]
    counts: tuple[int, ...]
    number: int
    total: float


SeriesKey = tuple[str, tuple[str, ...]]


class MetricAlias(msgspec.Struct, frozen=True):
    """What another exporter calls a metric, or one series of it: its value is ours times `factor`."""

    name: str
    where: tuple[tuple[str, str], ...] = ()
    factor: float = 1.0
    kind: Literal["gauge", "counter"] = "gauge"


class Metric(msgspec.Struct, frozen=True):
    """One metric: `name` is without the prefix; `unit` in the words of OpenMetrics, "" where it has none."""

    name: str
    kind: MetricKind
    unit: str
    help: str
    labels: tuple[str, ...] = ()
    opentelemetry_name: str = ""
    opentelemetry_unit: str = ""
    attributes: tuple[tuple[str, str], ...] = ()  # our label -> its name in OpenTelemetry
    dcgm_aliases: tuple[MetricAlias, ...] = ()
    aggregation: Aggregation = ""
    bounds: tuple[float, ...] = ()  # of a histogram
    constants: tuple[tuple[str, str], ...] = ()  # attributes in OpenTelemetry that are the same for every series

    @property
    def full_name(self) -> str:
        """As it is published."""
        return PREFIX + self.name


_DEVICE_ATTRIBUTES = (("device", "hw.id"),)
_CGROUP_ATTRIBUTES = (("cgroup", "traceloom.cgroup"), ("job", "traceloom.job"))
_OK_STATE_ATTRIBUTES = (("hw.state", "ok"),)
_DCGM_DEVICE_PREFIX = "DCGM_FI_DEV_"
_DCGM_PROFILING_PREFIX = "DCGM_FI_PROF_"
_STEP_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)

_DECLARED_METRICS = (
    # The host
    Metric("host_info", "info", "", "The host: 1, with what it is.", ("host", "boot", "kernel", "machine", "agent")),
    Metric("host_cpu_seconds_total", "counter", "seconds", "Time of all processors by mode.", ("mode",), "system.cpu.time", "s", (("mode", "cpu.mode"),)),
    Metric("host_load_ratio", "gauge", "ratio", "Runnable tasks of the last minute per processor.", (), "traceloom.host.load", "1"),
    Metric("host_memory_bytes", "gauge", "bytes", "Memory by state; used, free, cached and buffers add up to all of it.", ("state",), "system.memory.usage", "By", (("state", "system.memory.state"),)),
    Metric("host_swap_bytes", "gauge", "bytes", "Swap by state.", ("state",), "system.paging.usage", "By", (("state", "system.paging.state"),)),
    Metric("host_pressure_seconds_total", "counter", "seconds", "Time in which some or all tasks waited for a resource (PSI).", ("resource", "share"), "traceloom.host.pressure", "s", (("resource", "traceloom.resource"), ("share", "traceloom.share"))),
    Metric("host_disk_bytes_total", "counter", "bytes", "Bytes read from and written to a disk.", ("disk", "direction"), "system.disk.io", "By", (("disk", "system.device"), ("direction", "disk.io.direction"))),
    Metric("host_disk_operations_total", "counter", "", "Reads and writes of a disk.", ("disk", "direction"), "system.disk.operations", "{operation}", (("disk", "system.device"), ("direction", "disk.io.direction"))),
    Metric("host_disk_busy_seconds_total", "counter", "seconds", "Time in which a disk had work.", ("disk",), "system.disk.io_time", "s", (("disk", "system.device"),)),
    Metric("host_filesystem_bytes", "gauge", "bytes", "Space of a mounted file system by state.", ("mount", "state"), "system.filesystem.usage", "By", (("mount", "system.filesystem.mountpoint"), ("state", "system.filesystem.state"))),
    Metric("host_network_bytes_total", "counter", "bytes", "Bytes through a network interface.", ("interface", "direction"), "system.network.io", "By", (("interface", "network.interface.name"), ("direction", "network.io.direction"))),
    Metric("host_network_packets_total", "counter", "", "Packets through a network interface.", ("interface", "direction"), "system.network.packet.count", "{packet}", (("interface", "network.interface.name"), ("direction", "network.io.direction"))),
    Metric("host_network_errors_total", "counter", "", "Damaged packets of a network interface.", ("interface", "direction"), "system.network.errors", "{error}", (("interface", "network.interface.name"), ("direction", "network.io.direction"))),
    Metric("host_network_dropped_total", "counter", "", "Packets that a network interface dropped.", ("interface", "direction"), "system.network.packet.dropped", "{packet}", (("interface", "network.interface.name"), ("direction", "network.io.direction"))),
    Metric("rdma_bytes_total", "counter", "bytes", "Data through a port of an RDMA device.", ("device", "port", "direction"), "traceloom.rdma.io", "By", (("device", "hw.id"), ("port", "traceloom.port"), ("direction", "network.io.direction"))),
    Metric("rdma_packets_total", "counter", "", "Packets through a port of an RDMA device.", ("device", "port", "direction"), "traceloom.rdma.packets", "{packet}", (("device", "hw.id"), ("port", "traceloom.port"), ("direction", "network.io.direction"))),
    Metric("rdma_errors_total", "counter", "", "Errors, discards and congestion marks of a port of an RDMA device.", ("device", "port", "type"), "hw.errors", "{error}", (("device", "hw.id"), ("port", "traceloom.port"), ("type", "error.type"))),
    Metric("rdma_port_up", "gauge", "", "1 where the link of a port of an RDMA device is active.", ("device", "port"), "hw.status", "1", (("device", "hw.id"), ("port", "traceloom.port")), constants=_OK_STATE_ATTRIBUTES),
    Metric("oom_kills_total", "counter", "", 'Processes killed for want of memory, of the host (cgroup "") or of a cgroup.', ("cgroup", "job"), "traceloom.oom_kills", "{kill}", _CGROUP_ATTRIBUTES),
    # Control groups of processes that matter; `job` is the one whose group it is, "" where it is none's or several'
    Metric("cgroup_cpu_seconds_total", "counter", "seconds", "Processor time of a cgroup by mode.", ("cgroup", "job", "mode"), "container.cpu.time", "s", (*_CGROUP_ATTRIBUTES, ("mode", "cpu.mode"))),
    Metric("cgroup_periods_total", "counter", "", "Periods in which a processor quota of a cgroup was in force.", ("cgroup", "job"), "traceloom.cgroup.cpu.periods", "{period}", _CGROUP_ATTRIBUTES),
    Metric("cgroup_throttled_periods_total", "counter", "", "Periods in which the processor quota of a cgroup was used up.", ("cgroup", "job"), "traceloom.cgroup.cpu.throttled_periods", "{period}", _CGROUP_ATTRIBUTES),
    Metric("cgroup_throttled_seconds_total", "counter", "seconds", "Time in which tasks of a cgroup waited because its processor quota was used up, summed over processors.", ("cgroup", "job"), "traceloom.cgroup.cpu.throttled", "s", _CGROUP_ATTRIBUTES),
    Metric("cgroup_memory_bytes", "gauge", "bytes", "Memory of a cgroup, with the files that the kernel keeps for it.", ("cgroup", "job"), "container.memory.usage", "By", _CGROUP_ATTRIBUTES),
    Metric("cgroup_memory_working_set_bytes", "gauge", "bytes", "Memory of a cgroup without files that nobody used of late: what Kubernetes evicts by.", ("cgroup", "job"), "container.memory.working_set", "By", _CGROUP_ATTRIBUTES),
    Metric("cgroup_memory_state_bytes", "gauge", "bytes", "Memory of a cgroup by state: anonymous, file, shared, kernel.", ("cgroup", "job", "state"), "traceloom.cgroup.memory.state", "By", (*_CGROUP_ATTRIBUTES, ("state", "traceloom.state"))),
    Metric("cgroup_memory_limit_bytes", "gauge", "bytes", "Memory that a cgroup may have at most: the least limit of it and of those above it; absent without any.", ("cgroup", "job"), "traceloom.cgroup.memory.limit", "By", _CGROUP_ATTRIBUTES),
    Metric("cgroup_memory_peak_bytes", "gauge", "bytes", "The most memory that a cgroup ever had.", ("cgroup", "job"), "traceloom.cgroup.memory.peak", "By", _CGROUP_ATTRIBUTES),
    Metric("cgroup_swap_bytes", "gauge", "bytes", "Memory of a cgroup that was swapped out.", ("cgroup", "job"), "traceloom.cgroup.swap", "By", _CGROUP_ATTRIBUTES),
    Metric("cgroup_disk_bytes_total", "counter", "bytes", "Bytes that a cgroup read from and wrote to disks.", ("cgroup", "job", "direction"), "container.disk.io", "By", (*_CGROUP_ATTRIBUTES, ("direction", "disk.io.direction"))),
    Metric("cgroup_pressure_seconds_total", "counter", "seconds", "Time in which some or all tasks of a cgroup waited for a resource (PSI, cgroup v2).", ("cgroup", "job", "resource", "share"), "traceloom.cgroup.pressure", "s", (*_CGROUP_ATTRIBUTES, ("resource", "traceloom.resource"), ("share", "traceloom.share"))),
    # Processes: those that use a device, run a framework, or belong to a job
    Metric("process_info", "info", "", "A process: 1, with whose it is; join on `process`.", ("process", "pid", "job", "rank", "local_rank", "world_size", "user", "account", "namespace", "pod", "container", "framework", "command")),
    Metric("process_cpu_seconds_total", "counter", "seconds", "Processor time of a process by mode.", ("process", "mode"), "process.cpu.time", "s", (("process", "traceloom.process"), ("mode", "cpu.mode"))),
    Metric("process_memory_bytes", "gauge", "bytes", "Resident memory of a process.", ("process",), "process.memory.usage", "By", (("process", "traceloom.process"),)),
    Metric("process_threads", "gauge", "", "Threads of a process.", ("process",), "process.thread.count", "{thread}", (("process", "traceloom.process"),)),
    Metric("process_disk_bytes_total", "counter", "bytes", "Bytes that a process read from and wrote to disks.", ("process", "direction"), "process.disk.io", "By", (("process", "traceloom.process"), ("direction", "disk.io.direction"))),
    Metric("process_gpu_memory_bytes", "gauge", "bytes", "Memory of a device that a process holds.", ("process", "device"), "traceloom.process.gpu.memory", "By", (("process", "traceloom.process"), ("device", "hw.id"))),
    Metric("process_gpu_share_ratio", "gauge", "ratio", "Share of a device's busy time that is this process's; those of one device add up to 1.", ("process", "device"), "traceloom.process.gpu.share", "1", (("process", "traceloom.process"), ("device", "hw.id"))),
    # Devices
    Metric("gpu_info", "info", "", "A device: 1, with what it is; join on `device`.", ("device", "index", "vendor", "model", "pci", "driver", "parent", "partition")),
    Metric("gpu_up", "gauge", "", "1 where the device answers, 0 where its back end has not answered in time or the device is gone.", ("device",), "hw.status", "1", _DEVICE_ATTRIBUTES, constants=_OK_STATE_ATTRIBUTES),
    Metric("gpu_busy_ratio", "gauge", "ratio", "Share of time in which at least one kernel ran.", ("device",), "hw.gpu.utilization", "1", _DEVICE_ATTRIBUTES, (MetricAlias(_DCGM_DEVICE_PREFIX + "GPU_UTIL", (), 100.0),), "mean", constants=(("hw.gpu.task", "general"),)),
    Metric("gpu_graphics_active_ratio", "gauge", "ratio", "Share of cycles in which the compute or graphics engine was active.", ("device",), "traceloom.gpu.graphics.active", "1", _DEVICE_ATTRIBUTES, (MetricAlias(_DCGM_PROFILING_PREFIX + "GR_ENGINE_ACTIVE"),), "mean"),
    Metric("gpu_sm_active_ratio", "gauge", "ratio", "Share of cycles in which a multiprocessor had at least one warp, averaged over all.", ("device",), "traceloom.gpu.sm.active", "1", _DEVICE_ATTRIBUTES, (MetricAlias(_DCGM_PROFILING_PREFIX + "SM_ACTIVE"),), "mean"),
    Metric("gpu_sm_occupancy_ratio", "gauge", "ratio", "Resident warps per multiprocessor, of the most there can be.", ("device",), "traceloom.gpu.sm.occupancy", "1", _DEVICE_ATTRIBUTES, (MetricAlias(_DCGM_PROFILING_PREFIX + "SM_OCCUPANCY"),), "mean"),
    Metric("gpu_dram_active_ratio", "gauge", "ratio", "Share of cycles in which the device memory was transferring.", ("device",), "traceloom.gpu.dram.active", "1", _DEVICE_ATTRIBUTES, (MetricAlias(_DCGM_PROFILING_PREFIX + "DRAM_ACTIVE"),), "mean"),
    Metric("gpu_memory_busy_ratio", "gauge", "ratio", "Share of time in which device memory was read or written (memory controller).", ("device",), "traceloom.gpu.memory.busy", "1", _DEVICE_ATTRIBUTES, (MetricAlias(_DCGM_DEVICE_PREFIX + "MEM_COPY_UTIL", (), 100.0),), "mean"),
    Metric("gpu_pipe_active_ratio", "gauge", "ratio", "Share of cycles in which a pipe of the multiprocessors was active.", ("device", "pipe"), "traceloom.gpu.pipe.active", "1", (*_DEVICE_ATTRIBUTES, ("pipe", "traceloom.pipe")), (
        MetricAlias(_DCGM_PROFILING_PREFIX + "PIPE_TENSOR_ACTIVE", (("pipe", "tensor"),)), MetricAlias(_DCGM_PROFILING_PREFIX + "PIPE_FP64_ACTIVE", (("pipe", "fp64"),)), MetricAlias(_DCGM_PROFILING_PREFIX + "PIPE_FP32_ACTIVE", (("pipe", "fp32"),)), MetricAlias(_DCGM_PROFILING_PREFIX + "PIPE_FP16_ACTIVE", (("pipe", "fp16"),)),
        MetricAlias(_DCGM_PROFILING_PREFIX + "PIPE_TENSOR_IMMA_ACTIVE", (("pipe", "imma"),)), MetricAlias(_DCGM_PROFILING_PREFIX + "PIPE_TENSOR_HMMA_ACTIVE", (("pipe", "hmma"),)), MetricAlias(_DCGM_PROFILING_PREFIX + "PIPE_TENSOR_DFMA_ACTIVE", (("pipe", "dfma"),)), MetricAlias(_DCGM_PROFILING_PREFIX + "PIPE_INT_ACTIVE", (("pipe", "int"),)),
    ), "mean"),
    Metric("gpu_cycles_total", "counter", "", "Cycles of the multiprocessors since the host started in which a pipe was active; `elapsed` are all, `active` those with a warp.", ("device", "pipe"), "traceloom.gpu.cycles", "{cycle}", (*_DEVICE_ATTRIBUTES, ("pipe", "traceloom.pipe"))),
    Metric("gpu_video_busy_ratio", "gauge", "ratio", "Share of time in which the video encoder or decoder worked.", ("device", "engine"), "hw.gpu.utilization", "1", (*_DEVICE_ATTRIBUTES, ("engine", "hw.gpu.task")), (MetricAlias(_DCGM_DEVICE_PREFIX + "ENC_UTIL", (("engine", "encoder"),), 100.0), MetricAlias(_DCGM_DEVICE_PREFIX + "DEC_UTIL", (("engine", "decoder"),), 100.0)), "mean"),
    Metric("gpu_memory_used_bytes", "gauge", "bytes", "Device memory in use.", ("device",), "hw.gpu.memory.usage", "By", _DEVICE_ATTRIBUTES, (MetricAlias(_DCGM_DEVICE_PREFIX + "FB_USED", (), 2.0**-20),), "sum"),
    Metric("gpu_memory_free_bytes", "gauge", "bytes", "Device memory that is free.", ("device",), "traceloom.gpu.memory.free", "By", _DEVICE_ATTRIBUTES, (MetricAlias(_DCGM_DEVICE_PREFIX + "FB_FREE", (), 2.0**-20),)),
    Metric("gpu_memory_reserved_bytes", "gauge", "bytes", "Device memory that driver and firmware keep.", ("device",), "traceloom.gpu.memory.reserved", "By", _DEVICE_ATTRIBUTES, (MetricAlias(_DCGM_DEVICE_PREFIX + "FB_RESERVED", (), 2.0**-20),)),
    Metric("gpu_memory_limit_bytes", "gauge", "bytes", "All memory of the device.", ("device",), "hw.gpu.memory.limit", "By", _DEVICE_ATTRIBUTES),
    Metric("gpu_power_watts", "gauge", "watts", "Power draw.", ("device",), "hw.power", "W", _DEVICE_ATTRIBUTES, (MetricAlias(_DCGM_DEVICE_PREFIX + "POWER_USAGE"),), "sum"),
    Metric("gpu_power_limit_watts", "gauge", "watts", "Power that the device may draw.", ("device",), "traceloom.gpu.power.limit", "W", _DEVICE_ATTRIBUTES),
    Metric("gpu_energy_joules_total", "counter", "joules", "Energy since the driver was loaded.", ("device",), "hw.energy", "J", _DEVICE_ATTRIBUTES, (MetricAlias(_DCGM_DEVICE_PREFIX + "TOTAL_ENERGY_CONSUMPTION", (), 1000.0, "counter"),), "sum"),
    Metric("gpu_temperature_celsius", "gauge", "celsius", "Temperature of a part of the device.", ("device", "part"), "hw.temperature", "Cel", (*_DEVICE_ATTRIBUTES, ("part", "hw.sensor_location")), (MetricAlias(_DCGM_DEVICE_PREFIX + "GPU_TEMP", (("part", "gpu"),)), MetricAlias(_DCGM_DEVICE_PREFIX + "MEMORY_TEMP", (("part", "memory"),))), "mean"),
    Metric("gpu_clock_hertz", "gauge", "hertz", "Clock of a domain as it runs now.", ("device", "domain"), "traceloom.gpu.clock", "Hz", (*_DEVICE_ATTRIBUTES, ("domain", "traceloom.clock.domain")), (MetricAlias(_DCGM_DEVICE_PREFIX + "SM_CLOCK", (("domain", "sm"),), 1e-6), MetricAlias(_DCGM_DEVICE_PREFIX + "MEM_CLOCK", (("domain", "memory"),), 1e-6)), "mean"),
    Metric("gpu_throttled_seconds_total", "counter", "seconds", "Time in which something held the clocks down.", ("device", "reason"), "traceloom.gpu.throttled", "s", (*_DEVICE_ATTRIBUTES, ("reason", "traceloom.reason"))),
    Metric("gpu_throttled", "gauge", "", "1 for what holds the clocks down now.", ("device", "reason"), "traceloom.gpu.throttle", "1", (*_DEVICE_ATTRIBUTES, ("reason", "traceloom.reason"))),
    Metric("gpu_link_bytes_total", "counter", "bytes", "Data over the links of a device.", ("device", "link", "direction"), "hw.gpu.io", "By", (*_DEVICE_ATTRIBUTES, ("link", "traceloom.link"), ("direction", "network.io.direction"))),
    Metric("gpu_link_bytes_per_second", "gauge", "", "Rate of data over the links of a device, where its driver gives only that.", ("device", "link", "direction"), "traceloom.gpu.link.rate", "By/s", (*_DEVICE_ATTRIBUTES, ("link", "traceloom.link"), ("direction", "network.io.direction")), (
        MetricAlias(_DCGM_PROFILING_PREFIX + "PCIE_TX_BYTES", (("link", "pcie"), ("direction", "transmit"))), MetricAlias(_DCGM_PROFILING_PREFIX + "PCIE_RX_BYTES", (("link", "pcie"), ("direction", "receive"))),
        MetricAlias(_DCGM_PROFILING_PREFIX + "NVLINK_TX_BYTES", (("link", "nvlink"), ("direction", "transmit"))), MetricAlias(_DCGM_PROFILING_PREFIX + "NVLINK_RX_BYTES", (("link", "nvlink"), ("direction", "receive"))),
    )),
    Metric("gpu_errors_total", "counter", "", "Errors of the device by type; `xid` is NVIDIA's number where it is one.", ("device", "type", "xid"), "hw.errors", "{error}", (*_DEVICE_ATTRIBUTES, ("type", "error.type"), ("xid", "traceloom.xid")), (MetricAlias(_DCGM_DEVICE_PREFIX + "PCIE_REPLAY_COUNTER", (("type", "pcie-replay"),), 1.0, "counter"),)),
    Metric("gpu_last_xid", "gauge", "", "The number of the last Xid error since the agent started.", ("device",), "traceloom.gpu.xid", "1", _DEVICE_ATTRIBUTES, (MetricAlias(_DCGM_DEVICE_PREFIX + "XID_ERRORS"),)),
    Metric("gpu_remapped_rows", "gauge", "", "Rows of device memory that were remapped, by cause; `pending` and `failure` are 0 or 1.", ("device", "type"), "traceloom.gpu.remapped_rows", "{row}", (*_DEVICE_ATTRIBUTES, ("type", "error.type")), (
        MetricAlias(_DCGM_DEVICE_PREFIX + "UNCORRECTABLE_REMAPPED_ROWS", (("type", "uncorrectable"),)), MetricAlias(_DCGM_DEVICE_PREFIX + "CORRECTABLE_REMAPPED_ROWS", (("type", "correctable"),)), MetricAlias(_DCGM_DEVICE_PREFIX + "ROW_REMAP_FAILURE", (("type", "failure"),)),
    )),
    Metric("gpu_flops", "gauge", "", "Estimated FLOP/s: pipes' activity x measured clock x FLOP per clock; `method` says how the type of the matrix units is known.", ("device", "method", "bound"), "traceloom.gpu.flops", "{flop}/s", (*_DEVICE_ATTRIBUTES, ("method", "traceloom.method"), ("bound", "traceloom.bound")), (), "sum"),
    Metric("gpu_integer_ops", "gauge", "", "Integer operations per second of the matrix units at most, which are no FLOP; instructions of older generations do half as many.", ("device",), "traceloom.gpu.integer_ops", "{operation}/s", _DEVICE_ATTRIBUTES, (), "sum"),
    Metric("gpu_flop_utilization_ratio", "gauge", "ratio", "Activity of the matrix units x clock / highest clock: needs no element type.", ("device",), "traceloom.gpu.flop.utilization", "1", _DEVICE_ATTRIBUTES, (), "mean"),
    # Jobs
    Metric("job_info", "info", "", "A job on this host: 1, with whose it is; join on `job`.", ("job", "name", "scheduler", "user", "account", "partition", "namespace", "framework", "world_size")),
    Metric("job_processes", "gauge", "", "Processes of the job on this host.", ("job",), "traceloom.job.processes", "{process}", (("job", "traceloom.job"),)),
    Metric("job_devices", "gauge", "", "Devices that the job holds on this host; a shared one counts by its share.", ("job",), "traceloom.job.devices", "{device}", (("job", "traceloom.job"),)),
    Metric("job_device_seconds_total", "counter", "seconds", "Device time of the job by state: busy; idle, but allocated; unknown, while the device did not say. They add up to the time that it held devices.", ("job", "state"), "traceloom.job.device.time", "s", (("job", "traceloom.job"), ("state", "traceloom.state"))),
    Metric("job_reference_device_seconds_total", "counter", "seconds", "Busy device time weighted by peak FLOP/s against the reference device.", ("job",), "traceloom.job.reference_device.time", "s", (("job", "traceloom.job"),)),
    Metric("job_energy_joules_total", "counter", "joules", "Energy of the job's devices; of a shared one its share.", ("job",), "traceloom.job.energy", "J", (("job", "traceloom.job"),)),
    Metric("job_power_watts", "gauge", "watts", "Power draw of the job's devices; of a shared one its share.", ("job",), "traceloom.job.power", "W", (("job", "traceloom.job"),)),
    Metric("job_device_busy_ratio", "gauge", "ratio", "Share of the time in which the job held devices that they worked for it.", ("job",), "traceloom.job.device.busy", "1", (("job", "traceloom.job"),)),
    Metric("job_sm_active_ratio", "gauge", "ratio", "Share of cycles in which the multiprocessors of the job's devices had work, averaged over them.", ("job",), "traceloom.job.sm.active", "1", (("job", "traceloom.job"),)),
    Metric("job_flop_utilization_ratio", "gauge", "ratio", "Activity of the matrix units x clock / highest clock, averaged over the job's devices.", ("job",), "traceloom.job.flop.utilization", "1", (("job", "traceloom.job"),)),
    Metric("job_flops", "gauge", "", "Estimated FLOP/s of the job on this host.", ("job", "method", "bound"), "traceloom.job.flops", "{flop}/s", (("job", "traceloom.job"), ("method", "traceloom.method"), ("bound", "traceloom.bound"))),
    Metric("job_flops_error_ratio", "gauge", "ratio", "Estimate of the pipes against FLOPs per step of the job's own trace x steps per second: (estimate - counted) / counted.", ("job",), "traceloom.job.flops.error", "1", (("job", "traceloom.job"),)),
    Metric("job_roofline_ratio", "gauge", "ratio", "Share of the roofline that the job's last trace reached.", ("job",), "traceloom.job.roofline", "1", (("job", "traceloom.job"),)),
    Metric("job_input_bytes_total", "counter", "bytes", "Input of the job; `source` says whether it was declared or taken from copies to the device.", ("job", "source"), "traceloom.job.input", "By", (("job", "traceloom.job"), ("source", "traceloom.source"))),
    Metric("job_hung", "gauge", "", "1 where processes of the job make no steps any more and nothing shows that they work, else 0; absent where no steps are known.", ("job",), "traceloom.job.hung", "1", (("job", "traceloom.job"),)),
    Metric("job_hangs_total", "counter", "", "Hangs of the job that the agent has seen.", ("job",), "traceloom.job.hangs", "{hang}", (("job", "traceloom.job"),)),
    Metric("step_seconds", "histogram", "seconds", "Time of a training or inference step.", ("job", "rank"), "traceloom.step.duration", "s", (("job", "traceloom.job"), ("rank", "traceloom.rank")), (), "", _STEP_BUCKETS_S),
    Metric("dataloader_wait_seconds_total", "counter", "seconds", "Time that steps waited for the data loader.", ("job", "rank"), "traceloom.dataloader.wait", "s", (("job", "traceloom.job"), ("rank", "traceloom.rank"))),
    # Traces that nobody asked for
    Metric("trigger_requests_total", "counter", "", "Requests for traces that a rule made.", ("trigger",), "traceloom.trigger.requests", "{request}", (("trigger", "traceloom.trigger"),)),
    Metric("trigger_refusals_total", "counter", "", "Times that a rule would have made a request and was refused, by reason.", ("trigger", "reason"), "traceloom.trigger.refusals", "{refusal}", (("trigger", "traceloom.trigger"), ("reason", "error.type"))),
    Metric("trigger_traced_seconds_total", "counter", "seconds", "Time for which processes were traced by a rule.", ("trigger",), "traceloom.trigger.traced", "s", (("trigger", "traceloom.trigger"),)),
    Metric("trigger_kept_bytes_total", "counter", "bytes", "Size of the traces that a rule made.", ("trigger",), "traceloom.trigger.kept", "By", (("trigger", "traceloom.trigger"),)),
    Metric("trigger_budget_left_bytes", "gauge", "bytes", "What traces of rules may still have today; what runs counts with what it may have at most.", (), "traceloom.trigger.budget_left", "By"),
    # The agent itself
    Metric("collector_seconds", "gauge", "seconds", "How long the collector took when it last ran.", ("collector",), "traceloom.collector.duration", "s", (("collector", "traceloom.collector"),)),
    Metric("collector_failures_total", "counter", "", "Runs of a collector that failed or took too long.", ("collector", "reason"), "traceloom.collector.failures", "{failure}", (("collector", "traceloom.collector"), ("reason", "error.type"))),
    Metric("agent_cpu_seconds_total", "counter", "seconds", "Processor time of the agent.", (), "traceloom.agent.cpu.time", "s"),
    Metric("agent_memory_bytes", "gauge", "bytes", "Resident memory of the agent.", (), "traceloom.agent.memory", "By"),
    Metric("agent_series", "gauge", "", "Series that the agent has now.", (), "traceloom.agent.series", "{series}"),
    Metric("agent_probed_libraries", "gauge", "", "Libraries of processes that the agent has probes in.", (), "traceloom.agent.probed_libraries", "{library}"),
    Metric("agent_probes_lost_total", "counter", "", "Calls that probes saw and could not count.", (), "traceloom.agent.probes.lost", "{call}"),
    Metric("agent_history_bytes", "gauge", "bytes", "Size of the history on disk.", (), "traceloom.agent.history", "By"),
    Metric("agent_history_lost_total", "counter", "", "Ticks of history that could not be written.", ("reason",), "traceloom.agent.history.lost", "{tick}", (("reason", "error.type"),)),
    Metric("agent_usage_dropped_seconds_total", "counter", "seconds", "Device time that no minute of usage has: it came after its minute was sent, or beyond the 60 s of one, as where a clock was set.", (), "traceloom.agent.usage.dropped", "s"),
    Metric("agent_usage_lost_total", "counter", "", "Minutes of usage that no service took within two days, or that could not be written.", (), "traceloom.agent.usage.lost", "{minute}"),
    Metric("agent_requests_total", "counter", "", "Requests by what became of them.", ("route", "code"), "traceloom.agent.requests", "{request}", (("route", "http.route"), ("code", "http.response.status_code"))),
    Metric("agent_export_failures_total", "counter", "", "Deliveries of metrics by OTLP that failed.", (), "traceloom.agent.export.failures", "{failure}"),
)  # fmt: skip

METRICS = {metric.name: metric for metric in _DECLARED_METRICS}

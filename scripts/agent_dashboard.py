"""Writes deploy/agent/grafana-dashboard.json from the panels below; with --check, says whether it
is up to date.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from grafana import Board, Panel, variable
from made_page import write_or_check

BOARD = Path(__file__).resolve().parents[1] / "deploy" / "agent" / "grafana-dashboard.json"
# What the queries below abbreviate. Prometheus keeps the label `job` for its own jobs of scraping,
# and calls that of a target `exported_job`.
_LONG = {
    "OF_JOB": 'HERE, exported_job=~"$job"',
    "PER_DEVICE": "* on (instance, device) group_left (index, model) traceloom_gpu_info{HERE}",
    "HERE": 'instance=~"$instance"',
    "RATE": "$__rate_interval",
}
_GPU = "{{instance}} GPU {{index}}"

ROWS: dict[str, tuple[Panel, ...]] = {
    "At a glance": (
        Panel("Devices that answer", "none", {"": "sum(traceloom_gpu_up{HERE})"}, "", "stat", 4),
        Panel("Busy", "percentunit", {"": "avg(traceloom_gpu_busy_ratio{HERE})"}, "", "stat", 4),
        Panel(
            "SM active",
            "percentunit",
            {"": "avg(traceloom_gpu_sm_active_ratio{HERE})"},
            "",
            "stat",
            4,
        ),
        Panel("Power", "watt", {"": "sum(traceloom_gpu_power_watts{HERE})"}, "", "stat", 4),
        Panel(
            "FLOP/s, low and high bound",
            "flops",
            {
                "low": 'sum(traceloom_gpu_flops{HERE, bound="low"})',
                "high": 'sum(traceloom_gpu_flops{HERE, bound="high"})',
            },
            "",
            "stat",
            4,
        ),
        Panel(
            "Idle, but allocated",
            "none",
            {"": 'sum(rate(traceloom_job_device_seconds_total{OF_JOB, state="idle"}[RATE]))'},
            "Devices that jobs hold and do not use.",
            "stat",
            4,
        ),
    ),
    "Devices: none of the first three alone says whether work gets done": (
        Panel(
            "Busy",
            "percentunit",
            {_GPU: "traceloom_gpu_busy_ratio{HERE} PER_DEVICE"},
            "Share of time in which at least one kernel ran, however small.",
        ),
        Panel(
            "SM active",
            "percentunit",
            {_GPU: "traceloom_gpu_sm_active_ratio{HERE} PER_DEVICE"},
            "Share of cycles in which a multiprocessor had work, averaged over all of the device. A kernel that waits for others counts too.",
        ),
        Panel(
            "Power",
            "watt",
            {_GPU: "traceloom_gpu_power_watts{HERE} PER_DEVICE"},
            "Matrix products draw the most; busy at little power is waiting.",
        ),
        Panel(
            "Pipes",
            "percentunit",
            {
                "{{instance}} {{pipe}}": "avg by (instance, pipe) (traceloom_gpu_pipe_active_ratio{HERE})"
            },
            "Share of cycles in which a pipe worked, mean of the devices.",
        ),
        Panel(
            "Transfers of device memory",
            "percentunit",
            {_GPU: "traceloom_gpu_dram_active_ratio{HERE} PER_DEVICE"},
            "Share of cycles in which the device memory was transferring.",
        ),
        Panel(
            "FLOP/s, low and high bound",
            "flops",
            {
                "{{instance}} {{method}} low": 'sum by (instance, method) (traceloom_gpu_flops{HERE, bound="low"})',
                "{{instance}} {{method}} high": 'sum by (instance, method) (traceloom_gpu_flops{HERE, bound="high"})',
            },
            "Estimated from pipes, clock and element type; the bounds meet where a job declares the type or its trace shows it.",
        ),
    ),
    "Owners and jobs": (
        Panel(
            "Jobs",
            "none",
            {
                "": "traceloom_job_devices{OF_JOB} * on (instance, exported_job) group_left (name, scheduler, user, account, namespace, framework, world_size) traceloom_job_info{HERE}"
            },
            "Value: devices that the job holds on this host; a shared one counts by its share.",
            "table",
            12,
        ),
        Panel(
            "Processes on devices",
            "percentunit",
            {
                "": "traceloom_process_gpu_share_ratio{HERE} * on (instance, process) group_left (pid, exported_job, rank, user, command) traceloom_process_info{OF_JOB}"
            },
            "Value: part of the device's busy time.",
            "table",
            12,
        ),
        Panel(
            "Idle, but allocated",
            "none",
            {
                "{{exported_job}}": 'sum by (exported_job) (rate(traceloom_job_device_seconds_total{OF_JOB, state="idle"}[RATE]))'
            },
            "Devices of the job that did nothing.",
        ),
        Panel(
            "Devices of jobs, busy",
            "percentunit",
            {"{{instance}} {{exported_job}}": "traceloom_job_device_busy_ratio{OF_JOB}"},
            "Share of the time in which the job held them.",
        ),
        Panel(
            "Use of the matrix units",
            "percentunit",
            {"{{instance}} {{exported_job}}": "traceloom_job_flop_utilization_ratio{OF_JOB}"},
            "Their activity x clock / highest clock; needs no element type.",
        ),
        Panel(
            "FLOP/s of jobs, low and high bound",
            "flops",
            {
                "{{exported_job}} low": 'sum by (exported_job) (traceloom_job_flops{OF_JOB, bound="low"})',
                "{{exported_job}} high": 'sum by (exported_job) (traceloom_job_flops{OF_JOB, bound="high"})',
            },
        ),
        Panel(
            "Power of jobs",
            "watt",
            {"{{exported_job}}": "sum by (exported_job) (traceloom_job_power_watts{OF_JOB})"},
        ),
        Panel(
            "Host memory of jobs",
            "bytes",
            {
                "{{instance}} {{exported_job}}": "sum by (instance, exported_job) (traceloom_process_memory_bytes{HERE} * on (instance, process) group_left (exported_job) traceloom_process_info{OF_JOB})"
            },
            "Resident memory of their processes; what they share counts for each.",
        ),
    ),
    "Steps and data": (
        Panel(
            "Step time",
            "s",
            {
                "{{exported_job}} median": "histogram_quantile(0.5, sum by (exported_job, le) (rate(traceloom_step_seconds_bucket{OF_JOB}[RATE])))",
                "{{exported_job}} 95 %": "histogram_quantile(0.95, sum by (exported_job, le) (rate(traceloom_step_seconds_bucket{OF_JOB}[RATE])))",
            },
            "Where jobs report their steps.",
        ),
        Panel(
            "Mean step time by rank",
            "s",
            {
                "{{exported_job}} rank {{rank}}": "rate(traceloom_step_seconds_sum{OF_JOB}[RATE]) / rate(traceloom_step_seconds_count{OF_JOB}[RATE])"
            },
            "A rank that is slower makes all the others wait.",
        ),
        Panel(
            "Waits for the data loader",
            "percentunit",
            {
                "{{exported_job}} rank {{rank}}": "rate(traceloom_dataloader_wait_seconds_total{OF_JOB}[RATE]) / on (instance, exported_job, rank) rate(traceloom_step_seconds_sum{OF_JOB}[RATE])"
            },
            "Share of the time of steps.",
        ),
    ),
    "Memory, clocks and health of devices": (
        Panel(
            "Memory in use",
            "percentunit",
            {
                _GPU: "traceloom_gpu_memory_used_bytes{HERE} / traceloom_gpu_memory_limit_bytes{HERE} PER_DEVICE"
            },
        ),
        Panel(
            "Clock of the multiprocessors",
            "hertz",
            {_GPU: 'traceloom_gpu_clock_hertz{HERE, domain="sm"} PER_DEVICE'},
        ),
        Panel(
            "Temperature",
            "celsius",
            {_GPU + " {{part}}": "traceloom_gpu_temperature_celsius{HERE} PER_DEVICE"},
        ),
        Panel(
            "Throttling",
            "percentunit",
            {
                _GPU
                + " {{reason}}": "rate(traceloom_gpu_throttled_seconds_total{HERE}[RATE]) PER_DEVICE",
                _GPU + " {{reason}} now": "traceloom_gpu_throttled{HERE} PER_DEVICE",
            },
            "Share of time in which something held the clocks down; `now` is 1 while it does.",
        ),
        Panel(
            "Errors in the last hour",
            "none",
            {
                _GPU
                + " {{type}} {{xid}}": "increase(traceloom_gpu_errors_total{HERE}[1h]) PER_DEVICE",
                _GPU
                + " {{type}} {{xid}} for the first time": '(traceloom_gpu_errors_total{HERE, type="xid"} unless traceloom_gpu_errors_total{HERE} offset 1h) PER_DEVICE',
            },
            "Xid, ECC, PCIe and others; `xid` is NVIDIA's number. Its counter begins with the first, which is no increase.",
        ),
        Panel(
            "Last Xid",
            "none",
            {"": "traceloom_gpu_last_xid{HERE} PER_DEVICE"},
            "Since the agent started; a device that is missing here had none.",
            "table",
        ),
        Panel(
            "NVLink, PCIe",
            "Bps",
            {
                "{{instance}} {{link}} {{direction}}": "sum by (instance, link, direction) (traceloom_gpu_link_bytes_per_second{HERE} or rate(traceloom_gpu_link_bytes_total{HERE}[RATE]))"
            },
        ),
        Panel(
            "Remapped rows of memory",
            "none",
            {_GPU + " {{type}}": "traceloom_gpu_remapped_rows{HERE} PER_DEVICE"},
        ),
        Panel(
            "Devices that do not answer",
            "none",
            {
                "{{instance}}": "count by (instance) (traceloom_gpu_up{HERE}) - sum by (instance) (traceloom_gpu_up{HERE})"
            },
        ),
    ),
    "Host": (
        Panel(
            "Processors at work",
            "none",
            {
                "{{instance}} {{mode}}": 'sum by (instance, mode) (rate(traceloom_host_cpu_seconds_total{HERE, mode!="idle"}[RATE]))'
            },
        ),
        Panel("Memory", "bytes", {"{{instance}} {{state}}": "traceloom_host_memory_bytes{HERE}"}),
        Panel(
            "Pressure",
            "percentunit",
            {
                "{{instance}} {{share}} wait for {{resource}}": "rate(traceloom_host_pressure_seconds_total{HERE}[RATE])"
            },
            "Share of time in which some or all tasks waited (PSI).",
        ),
        Panel(
            "Network",
            "Bps",
            {
                "{{instance}} {{interface}} {{direction}}": "rate(traceloom_host_network_bytes_total{HERE}[RATE])"
            },
        ),
        Panel(
            "RDMA",
            "Bps",
            {
                "{{instance}} {{device}}/{{port}} {{direction}}": "rate(traceloom_rdma_bytes_total{HERE}[RATE])"
            },
        ),
        Panel(
            "RDMA: errors in the last hour, ports that are down",
            "none",
            {
                "{{instance}} {{device}}/{{port}} {{type}}": "increase(traceloom_rdma_errors_total{HERE}[1h])",
                "{{instance}} {{device}}/{{port}} down": "1 - traceloom_rdma_port_up{HERE}",
            },
        ),
        Panel(
            "Disks",
            "Bps",
            {
                "{{instance}} {{disk}} {{direction}}": "rate(traceloom_host_disk_bytes_total{HERE}[RATE])"
            },
        ),
        Panel(
            "Used space of file systems",
            "percentunit",
            {
                "{{instance}} {{mount}}": '1 - sum by (instance, mount) (traceloom_host_filesystem_bytes{HERE, state="free"}) / sum by (instance, mount) (traceloom_host_filesystem_bytes{HERE})'
            },
        ),
        Panel(
            "Killed for want of memory in the last hour",
            "none",
            {"{{instance}} {{cgroup}}": "increase(traceloom_oom_kills_total{HERE}[1h])"},
        ),
    ),
    "The agent itself": (
        Panel(
            "Agents",
            "none",
            {"": "traceloom_host_info{HERE}"},
            "Hosts with an agent, and its version.",
            "table",
            12,
        ),
        Panel(
            "Duration of collectors",
            "s",
            {"{{instance}} {{collector}}": "traceloom_collector_seconds{HERE}"},
            "",
            "timeseries",
            12,
        ),
        Panel(
            "Its processor time",
            "percentunit",
            {"{{instance}}": "rate(traceloom_agent_cpu_seconds_total{HERE}[RATE])"},
            "Of one processor.",
            "timeseries",
            6,
        ),
        Panel(
            "Its memory, its history on disk",
            "bytes",
            {
                "{{instance}} memory": "traceloom_agent_memory_bytes{HERE}",
                "{{instance}} history": "traceloom_agent_history_bytes{HERE}",
            },
            "",
            "timeseries",
            6,
        ),
        Panel(
            "Requests",
            "reqps",
            {"{{instance}} {{route}} {{code}}": "rate(traceloom_agent_requests_total{HERE}[RATE])"},
            "",
            "timeseries",
            6,
        ),
        Panel(
            "What failed in the last hour",
            "none",
            {
                "{{instance}} collector {{collector}}: {{reason}}": "increase(traceloom_collector_failures_total{HERE}[1h])",
                "{{instance}} history: {{reason}}": "increase(traceloom_agent_history_lost_total{HERE}[1h])",
            },
            "",
            "timeseries",
            6,
        ),
    ),
}


def host_snapshot() -> Board:
    """The whole dashboard."""
    return Board(
        title="Traceloom: hosts, devices and jobs",
        uid="traceloom-agent",
        text="Of the host agent (traceloom agent run). Jobs and steps need a scrape with a token.",
        tags=("traceloom", "gpu"),
        variables=(
            variable("instance", "Host", "label_values(traceloom_host_info, instance)"),
            variable("job", "Job", "label_values(traceloom_job_info{HERE}, exported_job)"),
        ),
        rows=ROWS,
        long=_LONG,
    )


if __name__ == "__main__":
    sys.exit(write_or_check(BOARD, json.dumps(host_snapshot().drawn(), indent=1) + "\n"))

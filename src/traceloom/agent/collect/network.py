"""Network interfaces and RDMA ports."""

from __future__ import annotations

from traceloom.agent.collect import HostCollector, read, read_if_there
from traceloom.agent.metrics import Reading

_MOST_INTERFACES = 64
_COLUMNS = {  # of /proc/net/dev: metric -> columns of what was received and sent
    "host_network_bytes_total": (0, 8),
    "host_network_packets_total": (1, 9),
    "host_network_errors_total": (2, 10),
    "host_network_dropped_total": (3, 11),
}
# File below `counters` -> what it counts. Data are counted in words of four bytes.
_WORD_BYTES = 4
_DATA = {"port_rcv_data": "receive", "port_xmit_data": "transmit"}
_PACKETS = {"port_rcv_packets": "receive", "port_xmit_packets": "transmit"}
_ERRORS = ("port_rcv_errors", "port_xmit_discards", "symbol_error", "link_downed", "port_xmit_wait")
_CONGESTION = ("np_cnp_sent", "rp_cnp_handled", "np_ecn_marked_roce_packets", "out_of_sequence", "packet_seq_err")


class Network(HostCollector):
    """Reads /proc/net/dev of the host: interfaces of hardware, and bonds; not those that containers hang on."""

    name = "network"

    def collect(self) -> list[Reading]:
        """Bytes, packets, errors and drops by interface and direction."""
        readings: list[Reading] = []
        lines = read(self.view / "net" / "dev").decode(errors="replace").splitlines()[2:]
        interfaces = [
            (name.strip(), rest.split()) for name, colon, rest in (line.partition(":") for line in lines) if colon
        ]
        # What leaves the host, and is not counted by another one too; in a container the only interfaces are virtual.
        net = self.sys / "class" / "net"
        all_count = not any((entry / "device").exists() for entry in net.glob("*"))
        chosen = [
            row
            for row in interfaces
            if row[0] != "lo"
            and (all_count or (net / row[0] / "device").exists() or (net / row[0] / "bonding").exists())
        ]
        for name, numbers in chosen[:_MOST_INTERFACES]:
            for metric, (received, sent) in _COLUMNS.items():
                readings += [
                    Reading(metric, (name, "receive"), int(numbers[received])),
                    Reading(metric, (name, "transmit"), int(numbers[sent])),
                ]
        return readings

    def trouble(self) -> list[str]:
        """Nothing: what is not there has no reading."""
        return []


class Rdma(HostCollector):
    """Reads /sys/class/infiniband: InfiniBand and RoCE."""

    name = "rdma"

    def collect(self) -> list[Reading]:
        """Every port of every device."""
        readings: list[Reading] = []
        for port in sorted((self.sys / "class" / "infiniband").glob("*/ports/*")):
            of = (port.parent.parent.name, port.name)
            state = read_if_there(port / "state").strip()
            if state:
                readings.append(Reading("rdma_port_up", of, float(b"ACTIVE" in state)))
            for directory in ("counters", "hw_counters"):
                for file in sorted((port / directory).glob("*")):
                    number = read_if_there(file).strip()  # counters of some ports say nothing
                    if not number.isdigit():
                        continue
                    if file.name in _DATA:
                        readings.append(Reading("rdma_bytes_total", (*of, _DATA[file.name]), int(number) * _WORD_BYTES))
                    elif file.name in _PACKETS:
                        readings.append(Reading("rdma_packets_total", (*of, _PACKETS[file.name]), int(number)))
                    elif file.name in (*_ERRORS, *_CONGESTION):
                        readings.append(Reading("rdma_errors_total", (*of, file.name), int(number)))
        return readings

    def trouble(self) -> list[str]:
        """Nothing: most hosts have none."""
        return []

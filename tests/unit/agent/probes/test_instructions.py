"""Instructions are encoded as the kernel's instruction set says."""

from __future__ import annotations

import pytest

from traceloom.agent.probes.ebpf import R0, R1, R2, R3, R6, R7, R10, Helper, ProbeProgram


def test_instructions_are_those_of_the_instruction_set() -> None:
    """Bytes as `llvm-mc --arch=bpf --show-encoding` prints them."""
    program = ProbeProgram()
    program.do(R6, "=", R1)  # r6 = r1
    program.load(R3, R6, 104)  # r3 = *(u64 *)(r6 + 104)
    program.do(R2, "=", -8)  # r2 = -8
    program.do(R7, ">>=", 32)  # r7 >>= 32
    program.store(R10, -4, R7, 4)  # *(u32 *)(r10 - 4) = r7
    program.store(R10, -16, 0)  # *(u64 *)(r10 - 16) = 0
    program.add_at(R1, 8, R2)  # lock *(u64 *)(r1 + 8) += r2
    program.wide(R2, 0x1122334455667788)
    program.map(R1, 5)
    program.jump_if(R0, "!=", 0, "end")  # if r0 != 0 goto +1
    program.call(Helper.TIME_NS)  # call 5
    program.label("end")
    program.exit()
    assert program.encoded().hex(" ", 8).split() == [
        "bf16000000000000",
        "7963680000000000",
        "b7020000f8ffffff",
        "7707000020000000",
        "637afcff00000000",
        "7a0af0ff00000000",
        "db21080000000000",
        "1802000088776655",
        "0000000044332211",
        "1811000005000000",
        "0000000000000000",
        "5500010000000000",
        "8500000005000000",
        "b700000000000000",
        "9500000000000000",
    ]


def test_a_number_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="wide"):
        ProbeProgram().do(R1, "=", 1 << 31)


def test_a_jump_to_nowhere_is_a_defect() -> None:
    program = ProbeProgram()
    program.jump("nowhere")
    with pytest.raises(KeyError, match="nowhere"):
        program.encoded()

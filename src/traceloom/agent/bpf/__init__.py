"""Probes of functions in processes that nobody prepared: small programs that the kernel runs when a function is called.

Nothing else is needed on the host: the programs are assembled here (`instructions`), loaded by bpf(2) (`kernel`),
attached to functions that are looked up in the symbol tables of libraries (`elf`, `uprobes`), and what they record
(`call_probes`, with stacks: `call_stacks`) is read from a ring buffer (`ring`). `support` says whether this kernel and
these rights allow it.
"""

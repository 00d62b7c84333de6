"""Stops one thread of a process, as a debugger does, and changes what it does next; the other threads go on.

Tests need this for events that no request causes: a fault of Larder itself, or a thread that hangs.
"""

import ctypes
import os
import platform
import re
import subprocess
import time
from pathlib import Path

# Requests of the C library's ptrace.
CONTINUE, READ_REGISTERS, WRITE_REGISTERS, DETACH = 7, 12, 13, 17
SEIZE, INTERRUPT = 0x4206, 0x4207
# A flag of `waitpid` for threads that are not the process's first.
ANY_THREAD = 0x40000000
TRAP = 5
BREAKPOINT = b"\xcc"
# An x86-64 processor's registers in the kernel's order, with the places of those used here.
REGISTERS = 27
PLACES = {"rdx": 12, "rdi": 14, "rip": 16, "rsp": 19}
# A thread that panics does not use its stack this far down.
BELOW = 1 << 18
PANIC = re.compile(r"4core6option13unwrap_failed")


def can_change_registers():
    return platform.machine() == "x86_64"


class StoppedThread:
    """A thread, found by its name, that is stopped until `go_on`."""

    def __init__(self, pid, name):
        threads = {int(path.name): (path / "comm").read_text().strip() for path in Path(f"/proc/{pid}/task").iterdir()}
        found = [thread for thread, called in threads.items() if name.search(called)]
        assert found, f"no thread is called so: {sorted(set(threads.values()))}"
        self.pid, self.thread = pid, found[0]
        self.libc = ctypes.CDLL(None, use_errno=True)
        self.libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
        self.ask(SEIZE)
        self.ask(INTERRUPT)
        os.waitpid(self.thread, ANY_THREAD)

    def ask(self, what, data=None):
        assert self.libc.ptrace(what, self.thread, None, data) == 0, os.strerror(ctypes.get_errno())

    def go_on(self):
        self.ask(DETACH)

    def until(self, function, seconds=30):
        """Lets the thread run until it calls a function with a matching mangled name, and stops it there; returns its
        registers."""
        at = self.address(function)
        before = self.memory(at, 1)
        self.change(at, BREAKPOINT)
        self.ask(CONTINUE)
        deadline = time.monotonic() + seconds
        while True:
            waited, status = os.waitpid(self.thread, ANY_THREAD | os.WNOHANG)
            if waited and os.WIFSTOPPED(status):
                if os.WSTOPSIG(status) == TRAP:
                    break
                # A signal of the thread's own.
                self.ask(CONTINUE, os.WSTOPSIG(status))
            if time.monotonic() > deadline:
                self.ask(INTERRUPT)
                os.waitpid(self.thread, ANY_THREAD)
                self.change(at, before)
                # A process with a stopped thread cannot end.
                self.go_on()
                raise TimeoutError(f"not called within {seconds} s: {function.pattern}")
            time.sleep(0.001)
        self.change(at, before)
        registers = (ctypes.c_ulonglong * REGISTERS)()
        self.ask(READ_REGISTERS, ctypes.addressof(registers))
        registers[PLACES["rip"]] = at
        self.ask(WRITE_REGISTERS, ctypes.addressof(registers))
        return registers

    def panic(self, function):
        """Makes the thread panic in a function instead of running it."""
        registers = self.until(function)
        # The place that a panic prints: pointer, length, line and column; the text behind it ends with a zero.
        place, text = registers[PLACES["rsp"]] - BELOW, b"a debugger\0"
        numbers = [(place + 24, 8), (len(text), 8), (1, 4), (1, 4)]
        self.change(place, b"".join(number.to_bytes(width, "little") for number, width in numbers) + text)
        registers[PLACES["rdi"]], registers[PLACES["rip"]] = place, self.address(PANIC)
        self.ask(WRITE_REGISTERS, ctypes.addressof(registers))
        self.go_on()

    def address(self, function):
        """The address of a function in the process."""
        program = os.readlink(f"/proc/{self.pid}/exe")
        symbols = subprocess.run(["nm", program], text=True, capture_output=True, check=True).stdout
        found = [line.split()[0] for line in symbols.splitlines() if function.search(line)]
        assert len(found) == 1, f"{len(found)} functions: {function.pattern}"
        first = Path(f"/proc/{self.pid}/maps").read_text().partition("-")[0]
        return int(found[0], 16) + int(first, 16)

    def memory(self, at, count):
        with open(f"/proc/{self.pid}/mem", "rb", buffering=0) as memory:
            memory.seek(at)
            return memory.read(count)

    def change(self, at, to):
        with open(f"/proc/{self.pid}/mem", "r+b", buffering=0) as memory:
            memory.seek(at)
            memory.write(to)

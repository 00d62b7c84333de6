"""The common parts of suites of scenarios: their names, their output, and waiting."""

import socket
import time

from driver import scratch_folder

ROWS = []


class Scenarios(dict):
    """The scenarios of a suite, by name."""

    def __call__(self, function):
        self[function.__name__] = function
        return function

    def run(self, names: list[str], prepare) -> None:
        """Runs the named scenarios, or all, with the result of `prepare` for a folder."""
        with scratch_folder() as folder:
            world = prepare(folder)
            for name in names or self:
                print(name, flush=True)
                self[name](world)


def row(what: str, result: str) -> None:
    ROWS.append((what, result))
    print(f"  {what}: {result}", flush=True)


def until(condition, what: str, patience: float = 30.0):
    deadline = time.monotonic() + patience
    while not (result := condition()):
        assert time.monotonic() < deadline, f"{what}: not in time"
        time.sleep(0.01)
    return result


def free_port() -> int:
    """A port that nobody uses at the moment, for servers that do not choose a port themselves."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]

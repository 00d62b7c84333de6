"""What suites of scenarios share: their names, what they print, and waiting."""

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
        """Runs those that are named, or all, with what `prepare` makes of a folder."""
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
    """A port that nobody has at the moment, for servers that do not choose one themselves."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]

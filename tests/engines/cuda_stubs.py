"""Makes CUDA libraries that do nothing, so that torch loads on a machine without CUDA: `cuda_stubs.py FOLDER`, where FOLDER has
torch's libraries. Every function fails with "driver too old", so that torch finds no GPU. Needs cc and readelf."""

import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

LIBRARIES = re.compile(
    r"cuda|cublas|cudnn|cufft|cufile|cupti|curand|cusparse|cusolver|nccl|nvrtc|nvshmem|nvJit|nvToolsExt"
)
FUNCTIONS = re.compile(
    r"^(cuda|cu[A-Z]|__cuda|cublas|cudnn|cufft|cuFile|cupti|curand|cusparse|cusolver|nccl|pnccl|nvrtc|nvshmem|nvJit|nvtx"
    r"|nvToolsExt)"
)
TEXTS = re.compile(r"String|ErrorName|StatusName")
RUNTIME = "libcudart.so.13"
DRIVER_TOO_OLD = 35


def main(folder: Path) -> None:
    libraries = list(folder.glob("*.so*"))
    needed: set[str] = set()
    undefined: set[tuple[str, str]] = set()
    defined: set[str] = set()
    file_of_version: dict[str, str] = {}
    for library in libraries:
        needed |= set(re.findall(r"NEEDED.*\[(.*?)\]", readelf("-dW", library)))
        file_of_version |= versions(readelf("-VW", library))
        for name, version, is_undefined in symbols(readelf("--dyn-syms", "-W", library)):
            if is_undefined:
                undefined.add((name, version))
            else:
                defined.add(name)
    present = {library.name for library in libraries}
    missing = sorted(name for name in needed if name not in present and LIBRARIES.search(name))
    wanted: dict[str, dict[str, set[str]]] = {name: defaultdict(set) for name in missing}
    for name, version in undefined:
        library = file_of_version.get(version)
        if version and library in wanted:
            wanted[library][version].add(name)
        elif not version and name not in defined and FUNCTIONS.match(name) and RUNTIME in wanted:
            wanted[RUNTIME][""].add(name)
    for version, library in file_of_version.items():
        if library in wanted:
            wanted[library].setdefault(version, set())
    for library, functions in wanted.items():
        compile_library(folder / library, functions)
    print(f"{len(wanted)} libraries that do nothing")


def readelf(*arguments: object) -> str:
    return subprocess.run(["readelf", *map(str, arguments)], capture_output=True, text=True).stdout


def versions(listing: str) -> dict[str, str]:
    """The file that each version of symbols is from."""
    found, file = {}, None
    for line in listing.splitlines():
        if match := re.search(r"File: (\S+)", line):
            file = match.group(1)
        match = re.search(r"Name: (\S+)\s+Flags", line)
        if match and file and "Rev" not in line:
            found[match.group(1)] = file
    return found


def symbols(listing: str):
    for line in listing.splitlines():
        words = line.split()
        if len(words) >= 8 and words[0].endswith(":") and words[7]:
            name, _, version = words[7].partition("@")
            if name:
                yield name, version.lstrip("@"), words[6] == "UND"


def compile_library(path: Path, functions: dict[str, set[str]]) -> None:
    names = sorted(set().union(*functions.values()))
    code = "".join(
        f'const char *{name}() {{ return "none"; }}\n'
        if TEXTS.search(name)
        else f"int {name}() {{ return {DRIVER_TOO_OLD}; }}\n"
        for name in names
    )
    script = "".join(
        f"{version} {{ {'global: ' + ' '.join(f'{name};' for name in sorted(of)) if of else ''} }};\n"
        for version, of in functions.items()
        if version
    )
    with tempfile.TemporaryDirectory() as scratch:
        source, exports = Path(scratch, "none.c"), Path(scratch, "none.map")
        source.write_text(code)
        exports.write_text(script)
        command = ["cc", "-w", "-shared", "-fPIC", f"-Wl,-soname,{path.name}", "-o", path, source]
        if script:
            command.append(f"-Wl,--version-script={exports}")
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))

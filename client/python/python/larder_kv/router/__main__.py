"""Starts the router: `python -m larder_kv.router --coordinator HOST:PORT --engine URL`."""

import argparse
import asyncio
import logging
import re
import resource
import sys
from pathlib import Path
from urllib.parse import urlsplit

from larder_kv.router.engines import Role, Source
from larder_kv.router.requests import GENERATING, OTHERS
from larder_kv.router.serve import Options, serve

EXAMPLE = """
python -m larder_kv.router --coordinator 10.0.0.10:7600 --engine http://10.0.0.1:8000 --engine http://10.0.0.2:8000

Of a name with several addresses, each is an engine; the addresses are looked up again and again.
"""
FILES_PER_REQUEST, OTHER_FILES = 3, 64
"""Open files: a request has a connection to its client, to an engine that computes its prompt, and to one that generates."""

logger = logging.getLogger("larder.router")


def main(arguments: list[str] | None = None) -> int:
    """Runs the router, and returns the exit code: 0 after a signal, 1 if it could not serve, 2 for wrong arguments."""
    parser = make_parser()
    given = parser.parse_args(arguments)
    try:
        options = read(given)
    except ValueError as error:
        parser.error(str(error))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    raise_open_files(options.most_requests)
    try:
        asyncio.run(serve(options, say))
    except (OSError, ValueError) as error:
        print(f"the router does not start: {error}", file=sys.stderr)
        return 1
    return 0


def say(url: str, status: str | None) -> None:
    """Prints the address on which the router listens."""
    print(f"routing at {url}" + (f", status at {status}" if status else ""), flush=True)


def raise_open_files(most_requests: int) -> None:
    """Allows this process as many open files as the system permits, and warns if so many requests need more."""
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        limit = most
    except (OSError, ValueError) as error:
        logger.warning("cannot raise the limit of open files to %d: %s", most, error)
    needed = FILES_PER_REQUEST * most_requests + OTHER_FILES
    if limit != resource.RLIM_INFINITY and limit < needed:
        logger.warning(
            "--most-requests=%d may need %d open files, and the limit is %d: raise it (`ulimit -n`, LimitNOFILE of the unit, or "
            "the container runtime's limit), or lower --most-requests",
            most_requests, needed, limit,
        )


def make_parser() -> argparse.ArgumentParser:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="python -m larder_kv.router",
        description=f"Sends each request to the vLLM where it costs least.\n{EXAMPLE}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    one = "[NODE=]URL"
    add(
        "--engine", metavar=one, action="append", default=[],
        help="a vLLM server; NODE is the Larder node that the server uses; without NODE the router asks the server",
    )
    add(
        "--prefill", metavar=one, action="append", default=[],
        help="a vLLM server that computes prompts for those of --decode",
    )
    add(
        "--decode", metavar=one, action="append", default=[],
        help="a vLLM server that generates from the prompts that --prefill computed",
    )
    add(
        "--coordinator", default="",
        help="HOST:PORT or URL of the coordinator's HTTP, several with commas; without it, the load alone decides",
    )
    add("--tenant", default="default", help="the tenant of these engines (default: %(default)s)")
    add("--listen", default="127.0.0.1:8080", help="HOST:PORT for clients (default: %(default)s)")
    add(
        "--status-listen", default="127.0.0.1:8081",
        help="HOST:PORT for /healthz, /readyz and /metrics, or `off` (default: %(default)s)",
    )
    add("--tls-certificate", type=Path, help="PEM file: clients speak TLS; the router reads a changed file while it runs")
    add("--tls-key", type=Path, help="PEM file of the certificate's key")
    add("--tls-client-ca", type=Path, help="PEM file: clients need a certificate of this authority")
    add("--engine-ca", type=Path, help="PEM file of the authority of engines with https")
    add(
        "--engine-api-key-file", type=Path,
        help="file with the engines' API key, for the router's own questions: for their nodes, models and tokens; clients send "
        "their own; the router reads a changed file while it runs",
    )
    add(
        "--allow", action="append", default=[], metavar="PATH",
        help=f"another path that clients may POST, beside {' '.join((*GENERATING, *OTHERS))}",
    )
    add(
        "--media-names", action="store_true",
        help="clients may name images and other media themselves (`uuid` of a message's part, `features` of "
        "/inference/v1/generate); only for clients that trust each other: vLLM takes the name for the medium",
    )
    add(
        "--hand-over", choices=["in-turn", "at-once"], default="in-turn",
        help="decode starts when the prompt is computed (in-turn), or together with prefill (at-once) (default: %(default)s)",
    )
    add(
        "--least-prefill-tokens", type=whole(0), default=256,
        help="prompts with fewer tokens to compute are computed by decode (default: %(default)s)",
    )
    add(
        "--most-requests", type=whole(1), default=4_096,
        help="requests at the same time; further requests get 503 (default: %(default)s)",
    )
    add(
        "--most-body-bytes", type=whole(1), default=16 << 20,
        help="the most bytes of a request's body (default: %(default)s)",
    )
    add(
        "--health-seconds", type=seconds, default=2.0,
        help="how often engines are checked and names looked up (default: %(default)s)",
    )
    add(
        "--health-patience-seconds", type=seconds, default=5.0,
        help="how long a check may take; two that fail take an engine out (default: %(default)s)",
    )
    add(
        "--connect-seconds", type=seconds, default=2.0,
        help="how long a connection to an engine may take (default: %(default)s)",
    )
    add(
        "--idle-seconds", type=seconds, default=600.0,
        help="how long an engine or a client may be silent within a request (default: %(default)s)",
    )
    add(
        "--leave-seconds", type=float, default=0.0,
        help="how long after SIGTERM the router still takes requests, while /readyz says 503 (default: %(default)s)",
    )
    add(
        "--drain-seconds", type=seconds, default=60.0,
        help="after that: how long the open requests may take (default: %(default)s)",
    )
    return parser


def read(given: argparse.Namespace) -> Options:
    """The options, checked. Raises `ValueError` with the reason."""
    sources = [source(role, one) for role, named in roles(given) for one in named]
    if not sources:
        raise ValueError("give at least one --engine, or --prefill and --decode")
    if given.prefill and not (given.decode or given.engine):
        raise ValueError("--prefill needs engines that go on from the prompts: --decode")
    if (given.tls_certificate is None) != (given.tls_key is None):
        raise ValueError("--tls-certificate and --tls-key go together")
    if given.tls_client_ca and not given.tls_certificate:
        raise ValueError("--tls-client-ca needs --tls-certificate")
    if wrong := [path for path in given.allow if not path.startswith("/")]:
        raise ValueError(f"--allow {wrong[0]}: a path starts with /")
    if given.leave_seconds < 0:
        raise ValueError("--leave-seconds is negative")
    return Options(
        sources=tuple(sources),
        coordinators=tuple(one for one in given.coordinator.split(",") if one),
        tenant=given.tenant,
        listen=address("--listen", given.listen),
        status_listen=None if given.status_listen == "off" else address("--status-listen", given.status_listen),
        certificate=given.tls_certificate,
        key=given.tls_key,
        client_ca=given.tls_client_ca,
        engine_ca=given.engine_ca,
        engine_api_key_file=given.engine_api_key_file,
        allow=tuple(given.allow),
        media_names=given.media_names,
        hand_over=given.hand_over,
        least_prefill_tokens=given.least_prefill_tokens,
        most_requests=given.most_requests,
        most_body_bytes=given.most_body_bytes,
        health_seconds=given.health_seconds,
        health_patience_seconds=given.health_patience_seconds,
        connect_seconds=given.connect_seconds,
        idle_seconds=given.idle_seconds,
        leave_seconds=given.leave_seconds,
        drain_seconds=given.drain_seconds,
    )


def roles(given: argparse.Namespace) -> list[tuple[Role, list[str]]]:
    """The engines of each role."""
    return [("both", given.engine), ("prefill", given.prefill), ("decode", given.decode)]


def source(role: Role, text: str) -> Source:
    """Parses `[NODE=]URL`: an engine, or several."""
    found = re.fullmatch(r"(?:([^=/]+)=)?(https?://.+)", text)
    url = urlsplit(found[2]) if found else None
    if not found or url is None or not url.hostname or url.path.strip("/") or url.query:
        raise ValueError(f"{text!r} is no [NODE=]URL with http or https and without a path")
    if url.username is not None:
        raise ValueError(f"the URL of {url.hostname} has a user: engines get the clients' own `authorization`")
    return Source(role, found[2].rstrip("/"), found[1])


def address(name: str, text: str) -> tuple[str, int]:
    """Parses HOST:PORT."""
    found = re.fullmatch(r"(\[[0-9a-fA-F:.]+\]|[^\s:]+):([0-9]{1,5})", text)
    if not found or int(found[2]) > 65_535:
        raise ValueError(f"{name} {text!r} is no HOST:PORT")
    return found[1].strip("[]"), int(found[2])


def seconds(text: str) -> float:
    """Parses a time above 0."""
    if not 0 < float(text) <= 86_400:
        raise ValueError
    return float(text)


def whole(least: int):  # type: ignore[no-untyped-def]
    """Makes a parser of whole numbers from `least` on."""

    def read_whole(text: str) -> int:
        if int(text) < least:
            raise ValueError
        return int(text)

    read_whole.__name__ = f"number from {least} on"
    return read_whole


if __name__ == "__main__":
    sys.exit(main())

"""The points at which a client measures, from what is asked for on the command line."""

from __future__ import annotations

from collections.abc import Sequence

from patcher.bench import UsageError
from patcher.bench.ab.served import ServedPoint, points_of, traces
from patcher.bench.engines.serving import ServingClient

BOTH_TRACES = "fixed,mixed"
"""What a client over HTTP sends where nothing else is asked for."""
MOST_USERS = 10_000
"""Each has a connection, and a computer has some 28,000 ports for them."""


def points_for(
    name: str,
    client: ServingClient,
    names: str | None,
    concurrencies: Sequence[int] | None,
    rates: Sequence[float],
    port: int | None,
) -> tuple[ServedPoint, ...]:
    """The points of a client; one without a server has no traffic to choose.

    Args:
        name: of the client.
        names: of traces; None: nothing was asked for.
        concurrencies: in place of the default ones.
        rates: as in `points_of`.
        port: of the server.

    Raises:
        UsageError: an option is of a server, there are too many users, or as `points_of`.
    """
    own = client.offline
    if own is None:
        if (most := max(concurrencies or (1,))) > MOST_USERS:
            raise UsageError(f"--concurrency {most}", f"give at most {MOST_USERS:,} users")
        return points_of(BOTH_TRACES if names is None else names, concurrencies, rates)
    of_server = {"--trace": names, "--rate": rates or None, "--port": port}
    if given := [option for option, value in of_server.items() if value is not None]:
        raise UsageError(
            f"{name} has no server and one kind of prompts, {traces()[own.trace].summary}: "
            f"leave out {' and '.join(given)}",
            "--concurrency says how many prompts at a time; --client vllm-bench has traces",
        )
    return points_of(own.trace, concurrencies or own.sizes or None)

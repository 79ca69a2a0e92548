"""`router up`: three nats-servers, two routers, eight workers; any one process is killed."""

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from random import Random
from time import monotonic
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest

from tests.system.e2e.client import MODEL
from tests.system.e2e.test_signals import alive, started
from tests.system.e2e.test_up import pid_of

CLUSTER = ("router", "up", "--nats-servers", "3", "--routers", "2", "--workers", "8", "--restart")
REQUESTS = 24
VERIFIED_S = 60.0


class Clients:
    """Clients that try the other router if one does not answer."""

    def __init__(self, routers: list[str]) -> None:
        self._routers = routers
        self._draw = Random(1)
        self.failed: list[str] = []
        self.tried_elsewhere = 0

    def ask(self) -> None:
        """Send requests to the routers in turn; what no router answers is in `failed`."""
        for number in range(REQUESTS):
            prompt = [self._draw.randrange(1000)] * 64 + list(range(200))
            body = json.dumps({"model": MODEL, "prompt": prompt, "max_tokens": 4}).encode()
            first, other = self._routers[number % 2], self._routers[1 - number % 2]
            problem = answered(first, body)
            if problem:
                self.tried_elsewhere += 1
                again = answered(other, body)
                self.failed += [f"{problem}; {again}"] if again else []


def answered(url: str, body: bytes) -> str:
    """Return why the router did not answer; empty: it did."""
    request = Request(f"{url}/v1/completions", body, {"content-type": "application/json"})  # noqa: S310 - loopback
    try:
        with urlopen(request, timeout=60) as response:  # noqa: S310
            usage = json.loads(response.read())["usage"]
            return "" if usage["completion_tokens"] == 4 else f"{usage}"
    except (URLError, ConnectionError, TimeoutError) as error:
        return f"{url}: {error}"


def verified(nats_url: str, control_url: str) -> str:
    """Return what `indexer verify` says of a router's index: empty once all is equal, or what it found at last."""
    command = [sys.executable, "-m", "indexer", "verify", "--nats-url", nats_url, "--index-url", control_url]
    end_s = monotonic() + VERIFIED_S
    while True:
        ran = subprocess.run(command, capture_output=True, text=True, check=False)
        if ran.returncode == 0:
            return ""
        if monotonic() > end_s:
            return f"{ran.returncode}: {ran.stdout}{ran.stderr}"


@pytest.mark.timeout(300)  # three deaths
def test_no_new_request_is_lost_by_the_death_of_any_process(tmp_path: Path) -> None:
    with started(*CLUSTER, "--port", "0", "--control-port", "0", "--logs", str(tmp_path)) as fleet:
        fleet.line_with("ready")
        clients = Clients(re.findall(r"^router\S* on +(\S+)", fleet.output, re.MULTILINE))
        controls = re.findall(r"control plane (\S+),", fleet.output)
        nats_url = fleet.output.split("event log")[1].split()[0]
        assert len(controls) == 2
        clients.ask()
        for victim in ("nats-0", "w3", "router"):
            assert clients.tried_elsewhere == 0, victim
            os.kill(pid_of(fleet, victim), signal.SIGKILL)
            clients.ask()
            fleet.line_with(f"{victim} ended with -9")
            fleet.line_with(f"{victim} runs again")
            clients.ask()
            assert clients.failed == [], victim
            assert [verified(nats_url, each) for each in controls] == ["", ""], victim
        assert clients.tried_elsewhere > 0
        children = fleet.children()
        fleet.signal(signal.SIGTERM)
        assert fleet.ended() == 0, fleet.output
        assert not alive(children)

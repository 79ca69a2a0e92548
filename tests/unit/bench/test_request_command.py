"""The command `router bench request`: a quick run on real processes."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.request.command import request
from bench.request.results import SHAPES
from bench.request.run import MODES
from bench.request.stages import LOOP, WRITES


@pytest.mark.slow
def test_a_quick_run_measures_every_request_and_names_what_is_absent(tmp_path: Path) -> None:
    written, markdown = tmp_path / "found.json", tmp_path / "found.md"
    ran = CliRunner().invoke(request, ["--quick", "--json", str(written), "--markdown", str(markdown)])
    assert ran.exit_code == 0, ran.output
    found = json.loads(written.read_bytes())
    assert [(each["mode"], each["shape"]) for each in found["cells"]] == [
        (mode, shape.name) for mode in MODES for shape in SHAPES
    ]
    assert not [line for line in found["absent"] if "failed" in line]
    assert found["events"]["batches_s"] > 0
    assert "### CPU us of a request" in markdown.read_text()
    for cell in found["cells"]:
        stages = cell["stages"]
        assert {"read", "parse", "send", "relay", "journal", WRITES} <= stages["calls"].keys()
        assert stages["path"]["stack"][-1].endswith("WorkerConnection.send")
        assert sum(stages["shares"].values()) == pytest.approx(1.0)
        assert stages["shares"][LOOP] > 0

"""The seconds of a start: one after another, and side by side."""

import json
import logging
import subprocess
import time

from support.forked import COLD_PYTHON

from salesrl_trl.names import START_UP_FILE, Phase, StartUp
from salesrl_trl.telemetry.instruments import imports_so_far, write_start
from salesrl_trl.telemetry.timeline import StepTimes
from salesrl_trl.timing import Span

STEP = StepTimes(started=20.0, ended=30.0, seconds={Phase.EVALUATION: 6.0, Phase.FORWARD: 4.0})
SPANS = [
    Span(name=StartUp.ENGINE, started=8.0, ended=19.0),
    Span(name=StartUp.IMPORTS, started=0.0, ended=3.0),
    Span(name=StartUp.IMPORTS, started=4.0, ended=8.0),
    Span(name=StartUp.WARM_UP, started=8.0, ended=10.0, track="rewards"),
    Span(name=StartUp.SERVICES, started=8.0, ended=8.01),
    Span(name=Phase.FORWARD, started=21.0, ended=25.0),
]


def test_a_start_is_told_by_phase_and_what_goes_on_beside_them_does_not_count(tmp_path, caplog):
    with caplog.at_level(logging.INFO, logger="salesrl_trl"):
        write_start(SPANS, STEP, tmp_path)
    assert caplog.messages[0] == (
        "[Start] 30.0 s to the end of the first step: imports 7.0, engine 11.0, first step 10.0 (evaluation 6.0), "
        "other 2.0; side by side with these: warm_up 2.0"
    )
    kept = json.loads((tmp_path / START_UP_FILE).read_text())
    assert kept["total_s"] == 30.0
    assert kept["phases_s"] == {"imports": 7.0, "engine": 11.0, "services": 8.01 - 8.0}
    assert kept["beside_s"] == {"warm_up": 2.0}


def test_imports_count_from_the_beginning_of_the_process():
    code = (
        "import time; time.sleep(0.3)\n"
        "from salesrl_trl.telemetry.instruments import imports_so_far\n"
        "print(imports_so_far().seconds)"
    )
    began = time.monotonic()
    result = subprocess.run([COLD_PYTHON, "-c", code], capture_output=True, text=True, check=True)
    assert 0.3 <= float(result.stdout) <= time.monotonic() - began + 0.05
    assert imports_so_far().ended <= time.perf_counter()

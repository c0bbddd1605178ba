"""What trackers get of a run beside its figures. `telemetry.trackers` owns how each of them takes it."""

from pathlib import Path

from salesrl_trl.telemetry.trackers import ScalarLayout, Trackers
from salesrl_trl.wiring.part import Part, PartContext


class TrackersPart(ScalarLayout, Part):
    """Writes TensorBoard's layout, hands tables on, and lets no tracker end a run."""

    def __init__(self) -> None: ...

    def connect(self, run: PartContext) -> None:
        self._run, self._trackers = run, Trackers(run.args.report_to, run.trl.callbacks.callbacks)
        banded = [branch for branch, target in run.args.kl_targets().items() if target.has_band]
        super().__init__(run.figures.words, banded, run.trl.callbacks.callbacks)

    def on_table(self, mode: str, step: int) -> None:
        args = self._run.args
        unique = bool(args.log_unique_prompts)
        self._trackers.log_table(Path(args.output_dir), mode, step, unique_prompts=unique)

    def end_run(self) -> None:
        self._trackers.close_files()

    def close(self) -> None:
        self._trackers.close()

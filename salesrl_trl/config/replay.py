"""Settings of a replay: rewards from another run's record."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from salesrl_trl.demo.packaged import CASSETTE, FILE
from salesrl_trl.errors import ConfigError
from salesrl_trl.recording.reader import record_files

ON_MISS = ("fail", "nearest", "live")


@dataclass
class ReplayConfig:
    """Rewards from another run's record."""

    replay: str | None = None
    """Output folder of a run with `record: true`, or `demo` for the packaged record of the demo's services. What is
    recorded is the reward, and no service is asked."""
    replay_on_miss: Annotated[str, ON_MISS] | None = None
    """What becomes of a completion that the record does not have. `fail`: it has no reward, reason `not_recorded`.
    `nearest`: the reward of the recorded completion of the same row whose text is most similar; for trying things,
    because it is another completion's. `live`: the services are asked. Defaults to `nearest` for the packaged record,
    and to `fail` for a run's."""
    replay_delays: bool = False
    """Whether rewards take as long as they did."""

    @property
    def asks_nobody(self) -> bool:
        """Whether rewards come from the record alone."""
        return self.replay is not None and self.on_miss != "live"

    @property
    def on_miss(self) -> str:
        """`replay_on_miss`, or its default."""
        # Another CPU's policy writes other texts, and the packaged record is for a first look on any machine.
        return self.replay_on_miss or ("nearest" if self.replay == CASSETTE else "fail")

    @property
    def replayed(self) -> Path:
        """Where the record is, with a `replay`."""
        assert self.replay is not None
        return FILE if self.replay == CASSETTE else Path(self.replay).expanduser()

    def check_replay(self) -> None:
        """Raises `ConfigError` where there is no record to replay."""
        if self.replay is None or record_files(self.replayed):
            return
        folders = {*Path("runs").glob("*"), *self.replayed.parent.glob("*")}
        runs = sorted(str(folder) for folder in folders if folder.is_dir() and record_files(folder))
        raise ConfigError(
            f"`replay` is {self.replay!r}, which holds no record. Expected one of: {', '.join([CASSETTE, *runs])}; or "
            "the output folder of another run with `record: true`."
        )

"""Settings of a replay: rewards from another run's record."""

from dataclasses import dataclass, field
from pathlib import Path

from salesrl_trl.config.checks import about, check, check_choice
from salesrl_trl.recording.schema import record_files

ON_MISS = ("fail", "nearest", "live")


@dataclass
class ReplayConfig:
    """Rewards from another run's record.

    Args:
        replay (`str`, *optional*):
            Output folder of a run with `record: true`. What it recorded is the reward, and no service is asked.
        replay_on_miss (`str`, *optional*, defaults to `"fail"`):
            What becomes of a completion that the record does not have. `fail`: it has no reward, reason
            `not_recorded`. `nearest`: the reward of the recorded completion of the same prompt whose text is most
            similar; for trying things, because it is another completion's. `live`: the services are asked.
        replay_delays (`bool`, *optional*, defaults to `False`):
            Whether rewards take as long as they did.
    """

    replay: str | None = field(default=None, metadata=about("Folder of a recorded run, whose rewards are taken."))
    replay_on_miss: str = field(default="fail", metadata=about(f"For what is not recorded: {', '.join(ON_MISS)}."))
    replay_delays: bool = field(default=False, metadata=about("Let replayed rewards take as long as they did."))

    @property
    def asks_nobody(self) -> bool:
        """Whether rewards come from the record alone."""
        return self.replay is not None and self.replay_on_miss != "live"

    def check_replay(self) -> None:
        """Raises `ConfigError` where there is no record to replay."""
        check_choice(self, "replay_on_miss", ON_MISS)
        check(
            self.replay is None or bool(record_files(Path(self.replay).expanduser())),
            f"`replay` is {self.replay!r}, which holds no record. Expected the output folder of a run with `record: "
            "true`.",
        )

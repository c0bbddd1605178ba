"""The files of a run's folder by kind (`run_files.toml`): what a push uploads, which are the policy's, and which are
an earlier run's and move into a folder of their own."""

import contextlib
import itertools
import json
import logging
import os
import shutil
import tempfile
import tomllib
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path

from salesrl_trl import names
from salesrl_trl.errors import ConfigError

logger = logging.getLogger(__name__)

FILES: dict[str, list[str]] = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
CARD = names.MODEL_CARD_FILE
SAVED = (*FILES["whole"], *FILES["adapter"], *FILES["tokenizer"])
PUBLIC = (*SAVED, CARD, ".gitattributes")
_Path = str | os.PathLike[str]


def found(folder: Path, patterns: Iterable[str]) -> set[Path]:
    return {path for pattern in patterns for path in folder.glob(pattern)}


def put_run_aside(folder: Path, resumed: _Path | None, used: Iterable[_Path | None] = ()) -> None:
    """Move the files of another run into `run-N` below the folder, where a run begins. Answers that are used again
    stay, as do files of others. Raises `ConfigError` if the run needs one that moves: `used`, such as its model."""
    for unfinished in folder.glob(f"{names.PUSHING_FOLDER}*"):  # of a run that was killed
        shutil.rmtree(unfinished, ignore_errors=True)
    is_its_own = resumed is not None and Path(resumed).resolve().parent == folder.resolve()
    if is_its_own or not found(folder, FILES["results"]):
        return
    is_saved = (folder / "training_args.bin").exists()  # by a trainer: else such files may be anyone's
    saved = (*SAVED, *[CARD] * may_write_card(folder)) if is_saved else ()
    moved = found(folder, (*FILES["results"], *FILES["settings"], *saved))
    moved = {path.parent if path.name.startswith("events.out") else path for path in moved}
    going = [folder.resolve() / path.relative_to(folder) for path in moved]
    for path in (Path(path).expanduser().resolve() for path in used if path is not None):
        if path == folder.resolve() or any(map(path.is_relative_to, going)):
            raise ConfigError(
                f"{folder} holds an earlier run, whose files would move to a folder of their own, and this run needs "
                f"{path}. Expected another `output_dir`. Name one, or resume the earlier run with "
                "`--resume_from_checkpoint auto`."
            )
    aside = _move(moved, folder, "the files of an earlier run")
    for path in found(folder, FILES["continued"]):
        shutil.copy2(path, aside)


def _move(paths: Iterable[Path], folder: Path, what: str) -> Path:
    places = (folder / f"{names.EARLIER_RUNS}{number}" for number in itertools.count(1))
    aside = next(place for place in places if not place.exists())
    for path in sorted(paths):
        place = aside / path.relative_to(folder)
        place.parent.mkdir(parents=True, exist_ok=True)
        path.rename(place)
    logger.warning(f"[Run] {what} in {folder} are in {aside} now")
    return aside


def may_write_card(folder: Path) -> bool:
    """Whether a card may be written there: a user's own README.md stays."""
    card = folder / CARD
    return not card.is_file() or "generated_from_trainer" in card.read_text(encoding="utf-8", errors="replace")


@contextlib.contextmanager
def one_policy(folder: Path, base: str, *, is_adapter: bool) -> Iterator[None]:
    """Inside the block a policy is saved into the folder. Another one's weights are moved to a folder of their own: an
    adapter would be put on them. `base`: the folder or name of the model that it belongs to."""
    stale = found(folder, FILES["whole" if is_adapter else "adapter"])
    is_its_base = is_adapter and Path(base).resolve() == folder.resolve()
    if not is_its_base and {path.suffix for path in stale} & {".safetensors", ".bin"}:  # a config.json may be anyone's
        _move(stale, folder, "weights of another policy")
    index = folder / "model.safetensors.index.json"
    if not is_adapter:
        index.unlink(missing_ok=True)  # of shards, which go with the save; it writes another one for its own
    yield
    if not is_adapter and index.exists():
        (folder / "model.safetensors").unlink(missing_ok=True)  # it would be read in place of the shards


def staged(policy: Path, output_dir: Path, inside: str | None) -> Path:
    """A folder with what may be uploaded of a saved policy: hard links, which outlive a checkpoint's rotation. With
    `inside` it has a folder of this name with the checkpoint, to resume from. `unstaged` deletes it."""
    place = Path(tempfile.mkdtemp(prefix=names.PUSHING_FOLDER, dir=output_dir)) / output_dir.resolve().name
    _link(found(policy, PUBLIC), policy, place)
    if inside is not None:
        files = found(policy, (*PUBLIC, *FILES["state"]))
        _link(files, policy, place / inside)
        manifest = json.loads((policy / names.MANIFEST_FILE).read_text(encoding="utf-8"))
        kept = {path.relative_to(policy).as_posix() for path in files}
        manifest["files"] = {name: entry for name, entry in manifest["files"].items() if name in kept}
        (place / inside / names.MANIFEST_FILE).write_text(json.dumps(manifest, indent=1) + "\n", encoding="utf-8")
    return place


def _link(files: Iterable[Path], folder: Path, place: Path) -> None:
    for path in filter(Path.is_file, files):
        copy = place / path.relative_to(folder)
        copy.parent.mkdir(parents=True, exist_ok=True)
        try:
            os.link(path, copy)
        except OSError:  # a disk without hard links
            shutil.copyfile(path, copy)


def unstaged(place: Path, upload: Future[object]) -> None:
    """Delete the folder of an upload that has ended. One that failed is logged: behind the training nobody asks."""
    shutil.rmtree(place.parent, ignore_errors=True)
    if (error := upload.exception()) is not None:
        logger.warning(f"[Run] a push to the hub failed ({type(error).__name__}); the next one uploads every file")

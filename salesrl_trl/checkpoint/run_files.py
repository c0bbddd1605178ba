"""The files of a run's folder by kind (`run_files.toml`): the policy's, those uploaded by a push, and those of an
earlier run, which are moved to a subfolder."""

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
    """Move another run's files to the subfolder `run-N` before a run begins. Reusable answers and unrelated files
    stay. Raises `ConfigError` if the run needs a file that would move: `used`, e.g. its model."""
    for unfinished in folder.glob(f"{names.PUSHING_FOLDER}*"):  # from a killed run
        shutil.rmtree(unfinished, ignore_errors=True)
    is_its_own = resumed is not None and Path(resumed).resolve().parent == folder.resolve()
    if is_its_own or not found(folder, FILES["results"]):
        return
    is_saved = (folder / "training_args.bin").exists()  # by a trainer; otherwise such files may be unrelated
    saved = (*SAVED, *([CARD] if may_write_card(folder) else [])) if is_saved else ()
    moved = found(folder, (*FILES["results"], *FILES["settings"], *saved))
    moved = {path.parent if path.name.startswith("events.out") else path for path in moved}
    going = [folder.resolve() / path.relative_to(folder) for path in moved]
    for path in (Path(path).expanduser().resolve() for path in used if path is not None):
        if path == folder.resolve() or any(map(path.is_relative_to, going)):
            raise ConfigError(
                f"{folder} contains an earlier run, whose files would be moved to a subfolder, but this run needs "
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
        shutil.move(path, place)  # a folder may be a link to another disk
    logger.warning(f"[Run] moved {what} in {folder} to {aside}")
    return aside


def may_write_card(folder: Path) -> bool:
    """Whether a card may be written there without overwriting a user's own README.md."""
    card = folder / CARD
    return not card.is_file() or "generated_from_trainer" in card.read_text(encoding="utf-8", errors="replace")


@contextlib.contextmanager
def one_policy(folder: Path, base: str, *, is_adapter: bool) -> Iterator[None]:
    """Context in which a policy is saved into the folder. Another policy's weights are moved to a subfolder, since an
    adapter would be applied to them. `base`: folder or name of the adapter's base model."""
    stale = found(folder, FILES["whole" if is_adapter else "adapter"])
    is_its_base = is_adapter and Path(base).resolve() == folder.resolve()
    if not is_its_base and {path.suffix for path in stale} & {".safetensors", ".bin"}:  # config.json may be another's
        _move(stale, folder, "weights of another policy")
    index = folder / "model.safetensors.index.json"
    if not is_adapter:
        index.unlink(missing_ok=True)  # index of shards that the save deletes; it writes one for its own shards
    yield
    if not is_adapter and index.exists():
        (folder / "model.safetensors").unlink(missing_ok=True)  # otherwise it would be read instead of the shards


def staged(policy: Path, output_dir: Path, inside: str | None) -> Path:
    """A folder with the uploadable files of a saved policy, as hard links that survive checkpoint rotation. With
    `inside`, a subfolder of this name has the checkpoint to resume from. `unstaged` deletes the folder."""
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
        except OSError:  # a file system without hard links
            shutil.copyfile(path, copy)


def unstaged(place: Path, upload: Future[object]) -> None:
    """Delete the folder of a finished upload, and log a failure, as nothing awaits background uploads."""
    shutil.rmtree(place.parent, ignore_errors=True)
    if (error := upload.exception()) is not None:
        logger.warning(f"[Run] a push to the hub failed ({type(error).__name__}); the next one will upload all files")

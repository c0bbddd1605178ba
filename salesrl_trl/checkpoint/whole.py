"""Whole checkpoints, by their manifest: size and digest of each file, and the checkpoint's number among those of its
folder. A run goes on from no folder that lacks a file of its manifest, or has other bytes."""

import fnmatch
import functools
import hashlib
import json
import logging
import os
from collections.abc import Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from salesrl_trl.errors import ConfigError
from salesrl_trl.ground.process import write_whole
from salesrl_trl.names import CHECKPOINT_FOLDERS, KL_STATE_FILE, MANIFEST_FILE, PARTS_STATE_FILE

logger = logging.getLogger(__name__)

AUTO = "auto"  # go on from the newest whole checkpoint, or from the start if there is none
STATE_FILE = "trainer_state.json"  # transformers' file with the counts of steps
READ_IF_THERE = (
    "*.safetensors", "*.bin", "*.index.json", "*.distcp", "*.pt", "*.pth", KL_STATE_FILE, PARTS_STATE_FILE,
)  # fmt: skip
"""Files that a run which goes on would read: transformers loads a model's weights in place of the adapter that the
checkpoint holds, for example. Other foreign files do no harm."""
_PIECE = 64 * 2**20  # bytes that are read and digested at a time
_THREADS = min(8, os.cpu_count() or 1)


@dataclass(frozen=True)
class Manifest:
    number: int  # orders the checkpoints of all runs of a folder, whatever the clock showed
    processes: int
    files: Mapping[str, tuple[int, str]]  # bytes and digest of each file, by its name
    has_optimizer: bool  # whether it holds more than the model, so that a run can go on from it
    run: str  # id of the run that saved it


def seal(folder: Path, processes: int, has_optimizer: bool, output_dir: Path | None = None, run: str = "") -> None:
    """Write the manifest of a checkpoint whose files are complete. `output_dir` holds the checkpoints before it."""
    before = (_read(folder) for folder in folders(output_dir or folder.parent))
    number = 1 + max((earlier.number for earlier in before if isinstance(earlier, Manifest)), default=0)
    sizes = {name: (folder / name).stat().st_size for name in _names(folder)}
    files = {name: {"bytes": size, "sha256": _digest(folder / name)} for name, size in sizes.items()}
    manifest = {"number": number, "processes": processes, "has_optimizer": has_optimizer, "run": run, "files": files}
    write_whole(folder / MANIFEST_FILE, json.dumps(manifest, indent=1) + "\n")


def _read(checkpoint: Path) -> Manifest | str:
    try:
        content = json.loads((checkpoint / MANIFEST_FILE).read_text(encoding="utf-8"))
        files = {str(name): (int(entry["bytes"]), str(entry["sha256"])) for name, entry in content["files"].items()}
        number, processes = int(content["number"]), int(content["processes"])
        return Manifest(number, processes, files, bool(content["has_optimizer"]), str(content["run"]))
    except FileNotFoundError:
        return f"it has no {MANIFEST_FILE}: the run ended while it was saved, or something else saved it"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its {MANIFEST_FILE} can't be read ({type(error).__name__})"


def read(checkpoint: Path) -> Manifest | str:
    """The manifest of a checkpoint whose files are there and as long as it says, or why no run can go on from it."""
    manifest = _read(checkpoint)
    if isinstance(manifest, str):
        return manifest
    if missing := {name for name in manifest.files if not (checkpoint / name).is_file()}:
        return f"{_files_are(missing)} missing"
    foreign = {*_names(checkpoint)} - manifest.files.keys()
    if read_too := {name for name in foreign if any(fnmatch.fnmatch(name, pattern) for pattern in READ_IF_THERE)}:
        return f"{_files_are(read_too)} not part of the checkpoint, but would be loaded"
    if cut := {name for name, (size, _) in manifest.files.items() if (checkpoint / name).stat().st_size != size}:
        return f"{_files_are(cut)} not as long as when it was saved"
    if not manifest.has_optimizer:
        return "it holds the model alone (`save_only_model`)"
    return manifest


def fault_of(checkpoint: Path, *, with_digests: bool = True) -> str | None:
    """Why a run can't go on from this folder; `None` if it can. Without `with_digests` only sizes are compared."""
    manifest = read(checkpoint)
    if isinstance(manifest, str) or not with_digests:
        return manifest if isinstance(manifest, str) else None
    changed = {
        name
        for name, (_, digest) in manifest.files.items()
        if _known_digest(checkpoint / name, (checkpoint / name).stat().st_mtime_ns) != digest
    }
    return f"{_files_are(changed)} not what was saved: other bytes" if changed else None


def step_of(checkpoint: Path) -> int:
    """Optimizer steps before a checkpoint, by its name; 0 for another name."""
    number = checkpoint.name.removeprefix(CHECKPOINT_FOLDERS)
    return int(number) if number.isdecimal() else 0


def folders(output_dir: Path) -> list[Path]:
    return sorted((path for path in output_dir.glob(f"{CHECKPOINT_FOLDERS}*") if path.is_dir()), key=step_of)


def whole(output_dir: Path) -> dict[Path, Manifest]:
    """The checkpoints with all of their files, in the order in which they were saved."""
    manifests = [(folder, read(folder)) for folder in folders(output_dir)]
    known = [(folder, manifest) for folder, manifest in manifests if isinstance(manifest, Manifest)]
    return dict(sorted(known, key=lambda each: each[1].number))


def newest(output_dir: Path, *, with_digests: bool = True) -> Path | None:
    """The checkpoint that was saved last and is whole. Logs which ones are passed over, and why."""
    known = whole(output_dir)
    faulty = [folder for folder in folders(output_dir) if folder not in known]
    for folder in (*faulty, *reversed(known)):
        fault = fault_of(folder, with_digests=with_digests)
        if fault is None:
            return folder
        logger.warning(f"{folder} is passed over: {fault}")
    return None


def find(
    asked: str | os.PathLike[str] | bool | None, output_dir: str, *, with_digests: bool = True,
    without_manifest: bool = False,
) -> Path | None:  # fmt: skip
    """The checkpoint to go on from; `None` for a run from the start. `asked`: a folder, `True` for the newest whole
    one of `output_dir`, or `"auto"` for the same, which may find none. `without_manifest` allows a named folder
    without a manifest. Raises `ConfigError` if there is no such checkpoint, or it is not whole."""
    word, folder = str(asked).lower(), Path(output_dir).expanduser()
    if asked is None or word == "false":
        return None
    if word in (AUTO, "true"):
        latest = newest(folder, with_digests=with_digests)
        if latest is None and word != AUTO:
            raise ConfigError(
                f"`resume_from_checkpoint` is {word!r}, and {output_dir} holds no whole checkpoint. Expected one. "
                "Name another `output_dir`, or give `auto`, which then begins from the start."
            )
        return latest
    checkpoint = Path(str(asked)).expanduser()
    if not checkpoint.is_dir():
        held = ", ".join(path.name for path in folders(folder)) or "none"
        raise ConfigError(
            f"`resume_from_checkpoint` is {str(asked)!r}, where there is no checkpoint. {output_dir} holds {held}."
        )
    if without_manifest and not (checkpoint / MANIFEST_FILE).exists():
        logger.warning(f"{checkpoint} has no {MANIFEST_FILE}: whether it is whole is not known")
    elif fault := fault_of(checkpoint, with_digests=with_digests):
        raise ConfigError(
            f"no run can go on from {checkpoint}: {fault}. Expected a checkpoint as it was saved. Take another one, "
            "or give `--resume_from_checkpoint auto`, which takes the newest whole one of `output_dir`. A folder "
            f"without a {MANIFEST_FILE} that you trust is taken with `allow_changed_resume: true`."
        )
    return checkpoint


def _names(folder: Path) -> list[str]:
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())
    return [name for name in names if name != MANIFEST_FILE]


def _files_are(names: Set[str]) -> str:
    """Names with their verb: `"a.pt is"`, `"a.pt and 2 more files are"`."""
    first, *others = sorted(names)
    return f"{first} and {len(others)} more files are" if others else f"{first} is"


@functools.cache
def _known_digest(path: Path, written_ns: int) -> str:
    """A file's digest, remembered until the file is written again: a run asks before and after a model is loaded."""
    return _digest(path)


def _digest(path: Path) -> str:
    """SHA-256 of the SHA-256 of each piece of 64 MiB, so that the pieces of a large file are read in parallel."""
    with path.open("rb") as file, ThreadPoolExecutor(_THREADS) as threads:
        places = range(0, path.stat().st_size, _PIECE)
        digests = threads.map(lambda place: hashlib.sha256(os.pread(file.fileno(), _PIECE, place)).digest(), places)
        return hashlib.sha256(b"".join(digests)).hexdigest()

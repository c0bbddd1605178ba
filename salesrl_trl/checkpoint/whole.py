"""Checkpoint integrity, by a manifest of sizes, digests and a sequence number. Changed folders cannot be resumed."""

import contextlib
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

AUTO = "auto"  # resume from the newest intact checkpoint, or start from scratch without one
STATE_FILE = "trainer_state.json"  # transformers' file with the step counts
READ_IF_THERE = (
    "*.safetensors", "*.bin", "*.index.json", "*.distcp", "*.pt", "*.pth", KL_STATE_FILE, PARTS_STATE_FILE,
)  # fmt: skip
"""Files that a resumed run would read if present: e.g., transformers would load a model's weights instead of the
checkpoint's adapter. Other foreign files are harmless."""
_PIECE = 64 * 2**20  # bytes read and hashed at a time
_THREADS = min(8, os.cpu_count() or 1)


@dataclass(frozen=True)
class Manifest:
    number: int  # orders the checkpoints of all runs in a folder, independent of the clock
    processes: int
    files: Mapping[str, tuple[int, str]]  # size in bytes and digest of each file, by name
    has_optimizer: bool  # whether it has more than the model, so that a run can resume from it
    run: str  # id of the saving run


def seal(folder: Path, processes: int, has_optimizer: bool, output_dir: Path | None = None, run: str = "") -> None:
    """Write the manifest of a checkpoint whose files are complete. `output_dir`: folder of the earlier checkpoints."""
    before = (_read(folder) for folder in folders(output_dir or folder.parent))
    number = 1 + max((earlier.number for earlier in before if isinstance(earlier, Manifest)), default=0)
    found = {name: (folder / name).stat() for name in _names(folder)}
    sums = {name: _digest(folder / name, file.st_mtime_ns) for name, file in found.items()}
    files = {name: {"bytes": file.st_size, "sha256": sums[name]} for name, file in found.items()}
    manifest = {"number": number, "processes": processes, "has_optimizer": has_optimizer, "run": run, "files": files}
    write_whole(folder / MANIFEST_FILE, json.dumps(manifest, indent=1) + "\n")


def _read(checkpoint: Path) -> Manifest | str:
    try:
        content = json.loads((checkpoint / MANIFEST_FILE).read_text(encoding="utf-8"))
        files = {str(name): (int(entry["bytes"]), str(entry["sha256"])) for name, entry in content["files"].items()}
        number, processes = int(content["number"]), int(content["processes"])
        return Manifest(number, processes, files, bool(content["has_optimizer"]), str(content["run"]))
    except FileNotFoundError:
        return f"it lacks {MANIFEST_FILE}: the run ended during the save, or something else saved it"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"its {MANIFEST_FILE} is unreadable ({type(error).__name__})"


def read(checkpoint: Path) -> Manifest | str:
    """The manifest of a checkpoint whose files exist with the right sizes, or why it cannot be resumed."""
    manifest = _read(checkpoint)
    if isinstance(manifest, str):
        return manifest
    with contextlib.suppress(FileNotFoundError):  # while another machine removes it from a shared disk
        if missing := {name for name in manifest.files if not (checkpoint / name).is_file()}:
            return f"{_files_are(missing)} missing"
        foreign = {*_names(checkpoint)} - manifest.files.keys()
        if read_too := {name for name in foreign if any(fnmatch.fnmatch(name, pattern) for pattern in READ_IF_THERE)}:
            return f"{_files_are(read_too)} not part of the checkpoint, but would be loaded"
        if cut := {name for name, (size, _) in manifest.files.items() if (checkpoint / name).stat().st_size != size}:
            return f"{_files_are(cut)} not as long as when it was saved"
        return manifest if manifest.has_optimizer else "it only contains the model (`save_only_model`)"
    return "its files are being removed"


def fault_of(checkpoint: Path, *, with_digests: bool = True) -> str | None:
    """Why this folder cannot be resumed, else `None`. Without `with_digests` only sizes are compared."""
    manifest = read(checkpoint)
    if isinstance(manifest, str) or not with_digests:
        return manifest if isinstance(manifest, str) else None
    changed = {
        name
        for name, (_, digest) in manifest.files.items()
        if _digest(checkpoint / name, (checkpoint / name).stat().st_mtime_ns) != digest
    }
    return f"{_files_are(changed)} modified since the save" if changed else None


def step_of(checkpoint: Path) -> int:
    """Optimizer steps done, according to a checkpoint's name; 0 for other names."""
    number = checkpoint.name.removeprefix(CHECKPOINT_FOLDERS)
    return int(number) if number.isdecimal() else 0


def folders(output_dir: Path) -> list[Path]:
    return sorted((path for path in output_dir.glob(f"{CHECKPOINT_FOLDERS}*") if path.is_dir()), key=step_of)


def whole(output_dir: Path) -> dict[Path, Manifest]:
    """The checkpoints with all their files, in the order they were saved."""
    manifests = [(folder, read(folder)) for folder in folders(output_dir)]
    known = [(folder, manifest) for folder, manifest in manifests if isinstance(manifest, Manifest)]
    return dict(sorted(known, key=lambda each: each[1].number))


def newest(output_dir: Path, *, with_digests: bool = True) -> Path | None:
    """The most recently saved intact checkpoint. Logs which ones are skipped, and why."""
    known = whole(output_dir)
    faulty = [folder for folder in folders(output_dir) if folder not in known]
    for folder in (*faulty, *reversed(known)):
        fault = fault_of(folder, with_digests=with_digests)
        if fault is None:
            return folder
        logger.warning(f"{folder} is skipped: {fault}")
    return None


def find(
    asked: str | os.PathLike[str] | bool | None, output_dir: str, *, with_digests: bool = True,
    without_manifest: bool = False,
) -> Path | None:  # fmt: skip
    """The checkpoint to resume from; `None` to start from scratch. `asked`: a folder, `True` for the newest intact one
    of `output_dir`, or `"auto"` for the same if any. `without_manifest` allows a named folder without a manifest.
    Raises `ConfigError` if the checkpoint does not exist or is damaged."""
    word, folder = str(asked).lower(), Path(output_dir).expanduser()
    if asked is None or word == "false":
        return None
    if word in (AUTO, "true"):
        latest = newest(folder, with_digests=with_digests)
        if latest is None and word != AUTO:
            raise ConfigError(
                f"`resume_from_checkpoint` is {word!r}, and {output_dir} contains no intact checkpoint. "
                "Name another `output_dir`, or use `auto`, which then starts from scratch."
            )
        return latest
    checkpoint = Path(str(asked)).expanduser()
    if not checkpoint.is_dir():
        held = ", ".join(path.name for path in folders(folder)) or "none"
        raise ConfigError(
            f"`resume_from_checkpoint` is {str(asked)!r}, which does not exist. {output_dir} contains {held}."
        )
    if without_manifest and not (checkpoint / MANIFEST_FILE).exists():
        logger.warning(f"{checkpoint} lacks {MANIFEST_FILE}: its integrity cannot be verified")
    elif fault := fault_of(checkpoint, with_digests=with_digests):
        raise ConfigError(
            f"cannot resume from {checkpoint}: {fault}. Expected a checkpoint as it was saved. Use another one, or "
            "`--resume_from_checkpoint auto` for the newest intact one of `output_dir`. To resume a trusted folder "
            f"without {MANIFEST_FILE}, set `allow_changed_resume: true`."
        )
    return checkpoint


def _names(folder: Path) -> list[str]:
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if not path.is_dir())
    return [name for name in names if name != MANIFEST_FILE]


def _files_are(names: Set[str]) -> str:
    """File names with their verb: `"a.pt is"`, `"a.pt and 2 more files are"`."""
    first, *others = sorted(names)
    return f"{first} and {len(others)} more files are" if others else f"{first} is"


@functools.cache
def _digest(path: Path, written_ns: int) -> str:
    """SHA-256 of the SHA-256s of 64 MiB pieces, so that a large file is read in parallel. Cached until the file is
    rewritten: it is needed before and after loading a model."""
    with path.open("rb") as file, ThreadPoolExecutor(_THREADS) as threads:
        places = range(0, path.stat().st_size, _PIECE)
        digests = threads.map(lambda place: hashlib.sha256(os.pread(file.fileno(), _PIECE, place)).digest(), places)
        return hashlib.sha256(b"".join(digests)).hexdigest()

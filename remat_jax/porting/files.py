"""Load and save state dicts: safetensors, whole or sharded, and PyTorch's formats, without running code from a file."""

from __future__ import annotations

import contextlib
import json
import pickle
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from remat_jax.errors import PortingError
from remat_jax.porting.tensors import as_numpy, as_torch, is_torch
from remat_jax.reading import read_limited
from remat_jax.report.document import written_whole

_TORCH = (".pt", ".pth", ".bin", ".ckpt")
_MOST_INDEX_BYTES = 64 * 2**20
_KINDS = f"a .safetensors file, one of PyTorch's ({', '.join(_TORCH)}), a .index.json of either, or a folder with one of these"


def load(path: str | Path, *, key: str | None = None) -> dict[str, Any]:
    """Return the state dict in a file, name → array, for `from_torch`.

    A safetensors file gives NumPy arrays and needs no PyTorch. A PyTorch file gives tensors on the CPU; a file that would run
    code is refused. `key` names the entry that is the state dict, if a PyTorch file has several entries. An index
    (`model.safetensors.index.json`) loads all its shards. In a folder, safetensors is preferred to PyTorch's formats.

    Raises:
        PortingError: the path cannot be read, is no model file, or is a folder with no model or several; the file holds no
            state dict, or float8 in safetensors; shards and index disagree; `key` is no text, or no entry of the file.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "model.safetensors"
    >>> save(path, {"head.bias": np.zeros(3, np.float32)})
    >>> load(path)["head.bias"].dtype
    dtype('float32')
    """
    if not (key is None or isinstance(key, str)):
        raise PortingError(f"key={key!r}: expected the name of an entry of the file, a text.")
    try:
        file = _one_file(_path(path))
        if file.name.endswith(".index.json"):
            return _load_shards(file, key)
        if file.suffix != ".safetensors":
            return _state_dict(_load_torch(file), file, key)
        if key is not None:
            raise PortingError(f"key={key!r}: {file.name} holds tensors alone; leave the key out.")
        return _load_safetensors(file)
    except OSError as error:
        raise PortingError(f"path={str(path)[:400]!r} cannot be read ({error.strerror or error}); give another file.") from None


def save(path: str | Path, state_dict: Mapping[str, Any], *, metadata: Mapping[str, str] | None = None) -> None:
    """Write a state dict, such as `to_torch` returns, to a `.safetensors` file or a file for `torch.load`; the suffix decides.

    `metadata` (text → text) goes into a safetensors file's header. Hugging Face needs `format: pt`, which is added if `format`
    is absent.

    Raises:
        PortingError: the suffix is unknown, a value is no array or has a dtype that the file format lacks, the metadata is no
            text, or the file cannot be written.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save(f"{folder}/model.safetensors", {"scale": np.ones(3, np.float32)})
    ...     load(f"{folder}/model.safetensors")
    {'scale': array([1., 1., 1.], dtype=float32)}
    """
    path = _path(path)
    if path.suffix not in (".safetensors", *_TORCH):
        raise PortingError(f"path={str(path)!r}: give a name that ends in .safetensors or one of {', '.join(_TORCH)}.")
    if not isinstance(state_dict, Mapping):
        raise PortingError(f"state_dict is a {type(state_dict).__name__}; give name → array, as to_torch returns it.")
    wrong = [str(name) for name, value in state_dict.items() if not (is_torch(value) or hasattr(value, "__array__"))]
    if wrong:
        raise PortingError(f"no arrays or tensors: {', '.join(wrong)}; give what to_torch returns.")
    if path.suffix != ".safetensors":
        if metadata:
            raise PortingError(f"metadata={metadata!r}: a {path.suffix} file cannot store metadata; write .safetensors.")
        tensors, torch = _converted(state_dict, lambda value: value if is_torch(value) else as_torch(value)), _torch(path)
        with _writing(path, RuntimeError) as new:
            torch.save(tensors, new)
        return
    unnamed = [repr(name) for name in state_dict if not isinstance(name, str)]
    if unnamed:
        raise PortingError(
            f"names that are not texts: {', '.join(unnamed)}; a safetensors file takes only texts, give str(name)."
        )
    header = {**metadata} if isinstance(metadata, Mapping) else metadata or {}
    if not isinstance(header, dict) or not all(isinstance(text, str) for text in (*header, *header.values())):
        raise PortingError(
            f"metadata={metadata!r:.400}: a safetensors file takes only texts; give text → text, such as str(value)."
        )
    _save_safetensors(path, _converted(state_dict, as_numpy), header)


def _converted(state_dict: Mapping[str, Any], convert: Callable[[Any], Any]) -> dict[str, Any]:
    converted, wrong = {}, []
    for name, value in state_dict.items():
        try:
            converted[name] = convert(value)
        except (PortingError, TypeError, AttributeError, KeyError) as error:  # the last two: a dtype unknown to PyTorch
            wrong.append(f"{name} ({error})")
    if wrong:
        raise PortingError(
            f"these cannot be written: {', '.join(wrong)}; give arrays of numbers; for a random key, give "
            "jax.random.key_data(key)."
        )
    return converted


def _path(path: Any) -> Path:
    try:
        return Path(path)
    except TypeError:
        raise PortingError(f"path={path!r:.400}: expected the path of a file; give {_KINDS}.") from None


@contextlib.contextmanager
def _writing(path: Path, refused: type[Exception]) -> Iterator[Path]:
    """Yield the path that a library writes to; errors of the library and the system become a PortingError with the path."""
    try:
        if path.is_dir() or not path.parent.is_dir():
            raise OSError("it is a folder" if path.is_dir() else "there is no such folder")
        with written_whole(path) as new:
            yield new
    except (refused, OSError, ValueError, TypeError) as error:  # a null byte in the path is a ValueError
        raise PortingError(
            f"path={str(path)[:400]!r} cannot be written ({error}); give a file in an existing folder, and content that this "
            "kind of file can hold."
        ) from None


def _one_file(path: Path) -> Path:
    path = _in_folder(path) if path.is_dir() else path
    # Reading a pipe or a device might never end.
    if not path.is_file():
        raise PortingError(f"path={str(path)[:400]!r}: no such file, or not a regular file; give {_KINDS}.")
    if not path.name.endswith((".index.json", ".safetensors", *_TORCH)):
        raise PortingError(f"path={str(path)!r}: not the name of a model file; give {_KINDS}.")
    return path


def _in_folder(folder: Path) -> Path:
    for ending in (".safetensors.index.json", ".safetensors", ".bin.index.json", *_TORCH):
        files = sorted(folder.glob(f"*{ending}"))
        if len(files) == 1:
            return files[0]
        if files:
            raise PortingError(f"path={str(folder)!r}: several models: {', '.join(x.name for x in files)}; name one of them.")
    raise PortingError(f"path={str(folder)!r}: a folder without a model; give {_KINDS}.")


def _load_shards(index: Path, key: str | None) -> dict[str, Any]:
    try:
        places = json.loads(read_limited(index, _MOST_INDEX_BYTES))["weight_map"]
        files = sorted(set(places.values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        files = None
    if files is None or not all(isinstance(name, str) and name.isprintable() for name in files):
        raise PortingError(f"{index.name}: expected JSON with a weight_map, tensor → file.")
    # Loading an index or a folder as a shard could recurse without end.
    strange = [name[:200] for name in files if not name.endswith((".safetensors", *_TORCH)) or (index.parent / name).is_dir()]
    if strange:
        raise PortingError(f"{index.name}: {', '.join(strange)}: expected names of shards, such as model-1.safetensors.")
    outside = [name for name in files if Path(name).name != name]
    if outside:
        raise PortingError(f"{index.name}: the shards must be in its folder, unlike {', '.join(outside)}.")
    result: dict[str, Any] = {}
    shards: dict[str, str] = {}
    problems = []
    for name in files:
        for tensor, value in load(index.parent / name, key=key).items():
            if tensor in shards:
                problems.append(f"{tensor}: duplicated, in {shards[tensor]} and in {name}")
            shards[tensor], result[tensor] = name, value
    lost = {tensor: name for tensor, name in places.items() if shards.get(tensor) != name}
    problems += [f"{tensor}: not in {name}, although the index says so" for tensor, name in lost.items()]
    problems += [f"{tensor}: in {name}, but not in the index" for tensor, name in shards.items() if tensor not in places]
    if problems:
        raise PortingError(f"{index.name} and its shards do not agree:\n  " + "\n  ".join(problems))
    return result


def _load_safetensors(path: Path) -> dict[str, np.ndarray]:
    safetensors = _safetensors()
    try:
        with safetensors.safe_open(path, framework="np") as file:
            kinds = {name: file.get_slice(name).get_dtype() for name in file.keys()}  # `file` itself cannot be iterated
            strange = [f"{name} ({kind})" for name, kind in kinds.items() if kind.startswith(("F8_", "F6_", "F4"))]
            if strange:
                raise PortingError(
                    f"{path.name}: NumPy's reader does not have this float dtype: {', '.join(strange)}; cast them in PyTorch."
                )
            # The arrays are copied, because the reader may return views of the file.
            return {name: np.array(file.get_tensor(name)) for name in kinds}
    except PortingError:
        raise
    except (safetensors.SafetensorError, ValueError) as error:  # NumPy's ValueError: an impossible size
        raise PortingError(f"{path.name}: not a safetensors file ({error}).") from None


def _save_safetensors(path: Path, arrays: dict[str, np.ndarray], metadata: dict[str, str]) -> None:
    strange = [f"{name} ({array.dtype.name})" for name, array in arrays.items() if array.dtype.name.startswith("float8")]
    if strange:
        raise PortingError(f"safetensors' writer for NumPy has no float8: {', '.join(strange)}; write a .pt file.")
    safetensors = _safetensors()
    # The writer ignores strides: a transposed view would be read back with its numbers in a different order.
    laid_out = {name: np.ascontiguousarray(array).reshape(array.shape) for name, array in arrays.items()}
    with _writing(path, safetensors.SafetensorError) as new:
        safetensors.numpy.save_file(laid_out, new, metadata={"format": "pt", **metadata})


def _load_torch(path: Path) -> Any:
    torch = _torch(path)
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        reason = (str(error).strip().splitlines() or [""])[0]
        raise PortingError(
            f"{path.name}: refused, because reading it could run code, or it is not a PyTorch file ({reason}). If you trust "
            "it, load it with torch.load(…, weights_only=False) and give module.state_dict()."
        ) from None
    except Exception as error:  # a truncated or corrupt file can raise anything in the reader
        reason = (str(error).splitlines() or [""])[0]
        raise PortingError(f"{path.name}: not a PyTorch file ({type(error).__name__}: {reason}).") from None


def _state_dict(content: Any, path: Path, key: str | None) -> dict[str, Any]:
    if key is not None:
        if not isinstance(content, Mapping) or key not in content:
            keys = ", ".join(map(repr, content)) if isinstance(content, Mapping) else type(content).__name__
            raise PortingError(f"key={key!r}: {path.name} holds {keys}.")
        content = content[key]
    if not isinstance(content, Mapping):
        raise PortingError(f"{path.name}: holds a {type(content).__name__}, no state dict.")
    wrong = [name for name, value in content.items() if not (isinstance(name, str) and is_torch(value))]
    if wrong:
        inside = [repr(name) for name in wrong if isinstance(content[name], Mapping)]
        hint = f"; give the name of the state dict as key: {', '.join(inside)}" if inside else ""
        raise PortingError(f"{path.name}: {', '.join(map(repr, wrong))}: not tensors{hint}.")
    return dict(content)


def _safetensors() -> Any:
    try:
        import safetensors.numpy
    except ImportError:
        raise PortingError("safetensors is not installed; pip install safetensors, or 'remat_jax[torch]'.") from None
    return safetensors


def _torch(path: Path) -> Any:
    try:
        import torch
    except ImportError:
        raise PortingError(
            f"{path.name} is a PyTorch file, and PyTorch is not installed; pip install 'remat_jax[torch]'."
        ) from None
    return torch

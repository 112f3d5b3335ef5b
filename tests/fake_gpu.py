"""A device that is not there: tensors of shapes alone, on "cuda", so that rounds for a GPU run where there is none.

Built on torch's FakeTensorMode. What a GPU would refuse or wait for raises `GpuBug` with the line that asked for it.
"""

import ctypes
import gc
import sys
import traceback
import types
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ROOT = Path(__file__).parents[1]
CUDA, META, DEVICE_TYPES = 1, 14, 20
"""torch's numbers of device types (c10::DeviceType)."""
GPU = torch.device("cuda", 0)
NOT_HERE = None if sys.platform == "linux" else "the guard of fake CUDA devices is set in libc10.so"
"""Why this machine has no fake GPU; None: it has."""


class GpuBug(AssertionError):
    """Something that a round on a GPU must not do, and the line of this repository that does it."""


@contextmanager
def device_guard() -> Iterator[None]:
    """Lets Python index tensors on "cuda" where torch was built without CUDA, which has no guard to switch devices.

    In its place stands that of "meta", which does nothing."""
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    name = "_ZN3c104impl26device_guard_impl_registryE"
    guards = (ctypes.c_void_p * DEVICE_TYPES).in_dll(library, name)
    before, limit = guards[CUDA], fake_tensor.CONSTANT_NUMEL_LIMIT
    if before is None:
        guards[CUDA] = guards[META]
    # Of a single number the mode would keep the value as well, on the device itself.
    fake_tensor.CONSTANT_NUMEL_LIMIT = -1
    try:
        yield
    finally:
        guards[CUDA], fake_tensor.CONSTANT_NUMEL_LIMIT = before, limit


class OneDevice(TorchDispatchMode):
    """Refuses operations with tensors of the host, and copies to and from it; a single number is a kernel's argument.

    FakeTensorMode itself refuses reads (`.item()`), shapes that depend on data, and most mixtures of devices."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        copies = func.overloadpacket.__name__ in ("_to_copy", "copy_")
        for one in tree_leaves((args, kwargs, out)):
            if isinstance(one, torch.Tensor) and not one.is_cuda and (copies or one.ndim > 0):
                raise RuntimeError(f"a tensor on the host, {list(one.shape)}, in {func}")
        return out


@contextmanager
def fake_gpu(*objects: Any) -> Iterator[None]:
    """While the block runs, "cuda" is a device of shapes without numbers, and the objects are on it.

    GpuBug for what it cannot do."""
    hopper = mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0))
    with device_guard(), hopper, FakeTensorMode() as mode:
        moved = move_to_fake_gpu(mode, objects)
        try:
            with naming_the_line():
                yield
        finally:
            for one, real in moved:  # tests share constants
                torch.utils.swap_tensors(one, real)


@contextmanager
def naming_the_line() -> Iterator[None]:
    """Errors of torch become GpuBug, with the innermost line of this repository."""
    try:
        yield
    except (RuntimeError, TypeError, AssertionError, NotImplementedError) as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [f for f in frames if is_ours(Path(f.filename))]
        if not own:
            raise
        at = f"{Path(own[-1].filename).relative_to(ROOT)}:{own[-1].lineno}: {own[-1].line}"
        said = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        raise GpuBug(f"{at}\n{said}") from error


def move_to_fake_gpu(mode: FakeTensorMode, objects: Any) -> list[tuple[Any, Any]]:
    """Every tensor that the objects hold, closures and hooks included, becomes one on the fake GPU, in place; so does
    every attribute that names the CPU as a device. Returns (moved, as it was) of the tensors."""
    moved = []
    for one in list(reachable(objects)):
        if isinstance(one, torch.Tensor) and not isinstance(one, FakeTensor):
            with mode:
                fake = torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device=GPU)
            if weakref.getweakrefs(one):  # of an earlier test in this process, in a cycle
                gc.collect()
            torch.utils.swap_tensors(one, fake)
            moved.append((one, fake))
        elif isinstance(one, dict):
            cpu = [n for n, v in one.items() if isinstance(v, torch.device) and v.type == "cpu"]
            one.update(dict.fromkeys(cpu, GPU))
    return moved


def is_ours(file: Path) -> bool:
    """Whether a file is code of this repository other than this one."""
    inside = file.is_relative_to(ROOT) and "site-packages" not in file.parts
    return inside and file != Path(__file__)


def reachable(root: Any) -> Iterator[Any]:
    """The objects that `root` holds, itself included; not what modules, classes and globals hold."""
    seen, stack = set(), [root]
    while stack:
        one = stack.pop()
        if id(one) in seen or isinstance(one, types.ModuleType | type | torch.Size | str):
            continue
        seen.add(id(one))
        yield one
        if isinstance(one, types.FunctionType):
            stack += [one.__closure__, one.__defaults__, one.__kwdefaults__]
        else:
            stack += gc.get_referents(one)
            if hasattr(one, "__dict__"):  # of few attributes Python makes no dict unless asked
                stack.append(vars(one))

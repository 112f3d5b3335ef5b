"""The target's hidden states from a server, for targets that a training process cannot hold.

The server writes the states of each request into a file of a folder that both see (its method `extract_hidden_states`),
and `train/states_server.py` starts it. A file is read and deleted before the next batch is asked for, so the folder
holds no more than one batch of each process. Here the target has only its embedding, final norm and LM head.
"""

import asyncio
import fcntl
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from decode.common.errors import UserError, one_line
from decode.common.files import read_json_object
from decode.model.hidden_states import HiddenStateSpec
from decode.model.layer_stack import final_norm
from decode.model.loading import Target
from decode.serving.running.completions import (
    Completions,
    ForeignReplyError,
    MalformedReplyError,
    PromptFailedError,
    Server,
    connect,
    open_client,
)
from train.data.batching import Batch
from train.settings.data import StatesServerConfig
from train.teacher.live import LiveTeacher, TeacherOutput

PLAUSIBLE = 5
"""The token that a server says to be most probable is among as many of those that its final states say."""


class ServedTeacher(LiveTeacher):
    """The frozen target in a server."""

    def __init__(self, target: Target, taps: HiddenStateSpec, s: StatesServerConfig):
        """UserError if the server cannot be reached, or its folder is not here or is one for other states."""
        super().__init__(target, taps)
        self.s = s
        self.norm = final_norm(self.model)
        self.tap_layers = taps.layers
        self.layers = served_layers(taps, target.runner.config.num_hidden_layers)
        check_states_folder(Path(s.folder), self.layers)
        self.server: Server = connect(s)

    @torch.no_grad()
    def get_output(self, batch: Batch) -> TeacherOutput:
        """Hidden states of the rows of a batch; values at padding are undefined. UserError if the server fails."""
        texts = [batch.row_tokens(number).tolist() for number in range(len(batch.starts))]
        states = asyncio.run(self._request_all(texts))
        shape = (*batch.input_ids.shape, len(self.layers), self.hidden)
        placed = torch.zeros(shape, dtype=self.model.dtype)
        for (line, column), row in zip(batch.starts, states, strict=True):
            placed[line, column : column + len(row)] = row.to(placed.dtype)
        placed = placed.to(self.model.device)
        final = self.norm(placed[..., -1, :])
        taps = [placed[..., self.layers.index(layer), :] for layer in self.tap_layers]
        return TeacherOutput(torch.cat(taps, -1) if taps else final, final)

    async def _request_all(self, texts: list[list[int]]) -> list[Tensor]:
        """[T, layers, H] for each of the `texts`, in their order."""
        free = asyncio.Semaphore(self.s.concurrency)
        async with open_client(self.server.url) as http:
            completions = Completions(http, self.server, self.s)

            async def request(ids: list[int]) -> Tensor:
                body = {"model": self.server.model, "prompt": ids, "max_tokens": 1}
                body |= {"temperature": 0.0, "return_token_ids": True}
                async with free:
                    return await completions.request(body, partial(self._read_reply, ids))

            try:
                return await asyncio.gather(*map(request, texts))
            except PromptFailedError as error:
                raise UserError(
                    f"the server at {self.s.url:.120} gave no states for a sample ({error}); if that is because of its "
                    "length, lower loop.max_length: the server needs room for one token more"
                ) from error

    def _read_reply(self, ids: list[int], data: Any) -> Tensor:
        """[T, layers, H] from the file that a reply names; the file is deleted."""
        try:
            path = data["kv_transfer_params"]["hidden_states_path"]
            token = data["choices"][0]["token_ids"][0]
        except (KeyError, IndexError, TypeError):
            raise ForeignReplyError("the server names no file of hidden states") from None
        # Only the name: what a server says must not lead out of the folder.
        states = take_states(Path(self.s.folder) / Path(str(path)).name, ids)
        if states.shape[1:] != (len(self.layers), self.hidden):
            raise ForeignReplyError(
                f"states of shape {list(states.shape[1:])}, but {len(self.layers)} of width {self.hidden} are needed"
            )
        self._check_final_state(states[-1, -1], token)
        return states

    def _check_final_state(self, state: Tensor, token: Any) -> None:
        """ForeignReplyError unless the served model's most probable token fits the final state [H] here: the state is
        another's, or the head and norm are."""
        normed = self.norm(state.to(self.model.device, self.model.dtype))
        best = self.head(normed[None])[0].topk(PLAUSIBLE).indices.tolist()
        if token not in best:
            raise ForeignReplyError(f"token {token} is not what the final state says ({best})")


def served_layers(taps: HiddenStateSpec, depth: int) -> list[int]:
    """The hidden states that a server has to extract, in rising order: inputs of layers, and at last the state behind
    all `depth` layers, before the final norm. These are the server's layer ids as well."""
    return sorted({*taps.layers, depth})


LAYERS_FILE = "layers.json"
"""In the server's folder: the layer ids that it extracts, as train/states_server.py wrote them."""


def check_states_folder(folder: Path, layers: list[int]) -> None:
    """UserError unless `folder` exists and, if it says which layers are extracted, these are the ones."""
    command = f"python train/states_server.py --target T --layers '{layers}' --folder {folder}"
    if not folder.name or not folder.is_dir():
        raise UserError(
            f"states.folder {str(folder)!r} is not there: name the folder into which the server writes ({command})"
        )
    file, served = folder / LAYERS_FILE, layers
    if file.is_file():
        what = f"{LAYERS_FILE} of train/states_server.py"
        served = read_json_object(file, what, ["layers"])["layers"]
    if served != layers:
        raise UserError(
            f"the server extracts the states of layers {served}, and this draft needs {layers}: start it with {command}"
        )


def take_states(file: Path, ids: list[int]) -> Tensor:
    """The states [T, layers, H] of the tokens `ids` in a server's file, which is deleted.

    The server holds a lock on FILE.lock until the file is complete. MalformedReplyError if it is missing or damaged,
    ForeignReplyError if it is of other tokens.
    """
    lock = file.with_name(f"{file.name}.lock")
    try:
        if lock.is_file():
            with lock.open() as held:
                fcntl.flock(held, fcntl.LOCK_SH)
        tensors = load_file(file)
        states, tokens = tensors["hidden_states"], tensors["token_ids"].tolist()
    except (OSError, SafetensorError, KeyError) as error:
        raise MalformedReplyError(f"no states in {file.name} ({one_line(error, 100)})") from None
    finally:
        file.unlink(missing_ok=True)
        lock.unlink(missing_ok=True)
    if tokens != ids or len(states) != len(ids):
        raise ForeignReplyError("the states are those of other tokens")
    return states

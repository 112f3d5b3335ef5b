"""Acceptance of a draft during training, measured with the decoder on a few fixed prompts."""

import itertools
from collections.abc import Sequence
from typing import Any

from decode.common import damage
from decode.common.chat.choice import with_template
from decode.common.chat.render import ChatTemplate
from decode.common.errors import UserError
from decode.drafts.base import Draft
from decode.engine.engine import decode
from decode.engine.image_prompts import ImageReader
from decode.engine.request_checks import check_draft_length
from decode.model.loading import Target
from decode.verification.sampling import SamplingParams
from eval.metrics.acceptance import Acceptance
from eval.tasks.images import PromptImages
from train.data.conversations import Prompt, encode_prompt
from train.data.mixture import Mixture
from train.data.sample_store import SampleRow
from train.data.sources import DOMAINS, read_prompts
from train.settings.data import PromptSource
from train.settings.training import AcceptanceEvalConfig


class AcceptanceEval:
    """Measures τ and α of a draft on the same prompts each time, equally many from each bundled domain.

    They are rendered with the settings of the chat template in `templates` (`read_setting`), each in turn. With an
    encoder-decoder as target they are those of the first `rows`, and where `rows` hold images those of the first that
    do.
    """

    def __init__(
        self,
        s: AcceptanceEvalConfig,
        target: Target,
        seed: int,
        rows: Mixture | None = None,
        templates: Sequence[dict[str, Any]] = ({},),
    ):
        check_draft_length(target, s.k, "check.k")
        self.config, self.target, self.seed = s, target, seed
        self.images: list[PromptImages] | None = None
        own: list[SampleRow] = []
        if rows is not None and target.is_encoder_decoder:
            own = rows[: s.prompts]
        elif rows is not None and rows.has_images:
            # Where all tokens are learned, no row says where its answer begins.
            shown = (row for row in rows if "images" in row and row["loss_spans"][0][0] > 0)
            own = list(itertools.islice(shown, s.prompts))
        self.prompts = [prompt_of(row) for row in own]
        if own and not target.is_encoder_decoder:
            reader, files = ImageReader.of(target), [row["images"] for row in own]
            self.images = [
                PromptImages(reader, *one) for one in zip(self.prompts, files, strict=True)
            ]
        if own:
            return
        limit = max(1, s.prompts // len(DOMAINS))
        sources = [PromptSource("bundled", domain, limit=limit) for domain in DOMAINS]
        prompts = read_prompts(sources, seed)
        given = [ChatTemplate(with_template(target.tokenizer, one), one) for one in templates]
        usable = [one for one in given if _renders(one, prompts[0])]
        if len(usable) < len(given):
            damage.warn(
                "acceptance in training is measured without the chat templates of the samples that need more than a "
                "user's message, such as tools"
            )
        self.prompts = [
            encode_prompt(template, prompt)
            for prompt, template in zip(
                prompts, itertools.cycle(usable or [target.chat]), strict=False
            )
        ]

    def measure(self, draft: Draft) -> dict[str, float]:
        """{"accept/tau", "accept/alpha", "accept/alpha_1", ...} of the draft with its present weights, at T = 1."""
        s = self.config
        samples = decode(
            self.target,
            draft,
            self.prompts,
            k=s.k,
            sampling=SamplingParams(temperature=1.0),
            max_new_tokens=s.max_new_tokens,
            seed=self.seed,
            images=self.images,
        )
        self.target.runner.capture_hidden_states(None)  # training installs its own hooks
        found = Acceptance.of(samples, s.k)
        values = {"accept/tau": found.tau.value, "accept/alpha": found.alpha.value}
        for i, alpha in enumerate(found.alpha_by_position, 1):
            values[f"accept/alpha_{i}"] = alpha.value
        return {name: value for name, value in values.items() if value is not None}


def prompt_of(row: SampleRow) -> list[int]:
    """The tokens before a row's first answer."""
    return [int(token) for token in row["input_ids"][: row["loss_spans"][0][0]]]


def _renders(template: ChatTemplate, prompt: Prompt) -> bool:
    """Whether the chat template renders the prompt."""
    try:
        encode_prompt(template, prompt)
    except UserError:
        return False
    return True

"""The noise of a recipe's `mismatch` section for transformers' `generate`: added to its logits, at the same addresses.

    from transformers import AutoModelForCausalLM, AutoTokenizer
    from vexact.recipe import MismatchSection
    from vexact.study.processor import NoiseProcessor

    folder = "models/SmolLM2-135M-Instruct"
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder)
    section = MismatchSection(site="logits", persistence="prefix", sigma=0.05)
    batch = tokenizer(["Water boils when", "The capital of France is"], return_tensors="pt", padding=True)
    processor = NoiseProcessor.of(section, seed=0).over(batch["attention_mask"])
    model.generate(**batch, do_sample=True, top_k=0, max_new_tokens=32, logits_processor=[processor])

`generate` calls it before temperature and filters, which is where the engine has its noise. transformers knows no
request, no sample and no step of training, so an address is the sequence's ids alone: persistence `prefix`, in every
step, of the side that samples. Two rows with the same ids meet the same noise, whatever the batch, and a run of vexact
with that section meets it too.

`generate` hands over ids, padding and all, and no mask. The padding id does not tell them apart: GPT-2's is also the
first token of many a prompt. So the mask of a batch's prompts has to be given, to `over`; without it every id counts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from vexact.errors import BadInput
from vexact.model.origin import EMPTY, Addresses, rolled, signed
from vexact.recipe import MismatchSection
from vexact.study import keys
from vexact.study.mismatch import Mismatch
from vexact.study.noise import Noise
from vexact_kernels import Kernels, load


@dataclass(frozen=True)
class NoiseProcessor:
    """A logits processor of transformers, which takes anything that is called as it calls its own.

    noise: of site logits and persistence prefix. kernels: draw it, on the CPU whatever the model's device. padding: of
    each prompt of a batch, how many ids it is padded with on the left, which are no part of its prefix; empty where no
    row is padded.
    """

    noise: Noise
    kernels: Kernels
    padding: tuple[int, ...] = ()

    @staticmethod
    def of(section: MismatchSection, seed: int, kernels: Kernels | None = None) -> NoiseProcessor:
        """section, seed: as a recipe has them. kernels: by default the compiled ones.

        Raises BadInput for a section whose noise has another site or side, needs more of an address, is not the same in
        every step, or has a size that must be solved for: that takes a policy.
        """
        for key, found, wanted in (
            ("site", section.actual_site, "logits"),
            ("persistence", section.actual_persistence, "prefix"),
            ("side", section.side, "sampler"),
        ):
            if found != wanted:
                raise BadInput(f"mismatch.{key} = {found}: a logits processor knows {wanted} only")
        for key in ("start", "stop", "ramp"):
            if getattr(section, key):
                raise BadInput(f"mismatch.{key} = {getattr(section, key)}: a logits processor knows no steps, give 0")
        if section.target:
            raise BadInput("mismatch.k3 is solved for on a policy: give a logits processor mismatch.sigma")
        mismatch = Mismatch(section, seed)
        noise = Noise(section, int(keys.mixed(mismatch.seed, 0)[0]), section.actual_sigma)
        return NoiseProcessor(noise, load("cpu") if kernels is None else kernels)

    def over(self, attention_mask: Tensor) -> NoiseProcessor:
        """For one call of `generate` on prompts with that mask, [B, T] of 1 and 0 or bool: 1 at a token, 0 at padding.

        Its rows may be B or, one prompt's beside one another, a multiple: several sequences or beams of each. Raises
        BadInput where a prompt has no token, or padding elsewhere than on its left.
        """
        if attention_mask.ndim != 2 or not bool(((attention_mask == 0) | (attention_mask == 1)).all()):
            raise BadInput(f"attention_mask: {list(attention_mask.shape)}, not [B, T] of 1 and 0")
        return replace(self, padding=tuple(_padding_of(row, i) for i, row in enumerate(attention_mask.bool().tolist())))

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """input_ids: int64 [B, T], all ids so far; scores: float32 [B, V], the logits behind them. Disturbed scores.

        A score of −∞ stays. Raises BadInput where the rows are not those of the prompts that it is `over`.
        """
        padding = self._of_rows(*input_ids.shape)
        prefixes = [signed(rolled(EMPTY, row[count:])) for row, count in zip(input_ids.tolist(), padding, strict=True)]
        nothing = torch.zeros(len(prefixes), dtype=torch.int64)
        at = Addresses(torch.tensor(prefixes, dtype=torch.int64), nothing, nothing, nothing, nothing.bool())
        clean = scores.to(device="cpu", dtype=torch.float32).contiguous()
        return self.noise.logits(clean, at, self.kernels).to(device=scores.device, dtype=scores.dtype)

    def _of_rows(self, rows: int, length: int) -> list[int]:
        """The padding of each row of that length."""
        if not self.padding:
            return [0] * rows
        each, left = divmod(rows, len(self.padding))
        if left or length <= max(self.padding):
            said = f"attention_mask is of {len(self.padding)} prompts, padded by up to {max(self.padding)}"
            raise BadInput(f"{said}: {rows} rows of {length} ids are not of these")
        return [count for count in self.padding for _ in range(each)]


def _padding_of(mask: list[bool], row: int) -> int:
    """How many places of a row are padding, all on its left. Raises BadInput where others are, or all."""
    if True not in mask:
        raise BadInput(f"attention_mask: row {row} holds no token")
    count = mask.index(True)
    if not all(mask[count:]):
        raise BadInput(f"attention_mask: row {row} has padding behind a token: give the tokenizer padding_side='left'")
    return count

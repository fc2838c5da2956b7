"""The noise of a recipe's `mismatch` section for transformers' `generate`: added to its logits, at the same addresses.

    from transformers import AutoModelForCausalLM, AutoTokenizer
    from vexact.recipe import MismatchSection
    from vexact.study.processor import NoiseProcessor

    folder = "models/SmolLM2-135M-Instruct"
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder)
    section = MismatchSection(site="logits", persistence="prefix", sigma=0.05)
    processor = NoiseProcessor.of(section, seed=0, padding=tokenizer.pad_token_id)
    batch = tokenizer(["Water boils when", "The capital of France is"], return_tensors="pt", padding=True)
    model.generate(**batch, do_sample=True, top_k=0, max_new_tokens=32, logits_processor=[processor])

`generate` calls it before temperature and filters, which is where the engine has its noise. transformers knows no
request and no sample, so an address is the sequence's ids alone: persistence `prefix`. Two rows with the same ids meet
the same noise, whatever the batch, and a run of vexact with that section meets it too.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import dropwhile

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

    noise: of site logits and persistence prefix. kernels: draw it, on the CPU whatever the model's device. padding: the
    id that rows of a batch are padded with on the left, which is no part of their prefix; None where they are not.
    """

    noise: Noise
    kernels: Kernels
    padding: int | None = None

    @staticmethod
    def of(
        section: MismatchSection, seed: int, kernels: Kernels | None = None, padding: int | None = None
    ) -> NoiseProcessor:
        """section, seed: as a recipe has them. kernels: by default the compiled ones.

        Raises BadInput for a section whose noise has another site or needs more of an address, or whose size must be
        solved for: that takes a policy.
        """
        for key, found, wanted in (
            ("site", section.actual_site, "logits"),
            ("persistence", section.actual_persistence, "prefix"),
        ):
            if found != wanted:
                raise BadInput(f"mismatch.{key} = {found}: a logits processor knows {wanted} only")
        if section.target:
            raise BadInput("mismatch.k3 is solved for on a policy: give a logits processor mismatch.sigma")
        mismatch = Mismatch(section, seed)
        noise = Noise(section, int(keys.mixed(mismatch.seed, 0)[0]), section.actual_sigma)
        return NoiseProcessor(noise, load("cpu") if kernels is None else kernels, padding)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """input_ids: int64 [B, T], all ids so far; scores: float32 [B, V], the logits behind them. Disturbed scores.

        A score of −∞ stays.
        """
        prefixes = [self._prefix(row) for row in input_ids.tolist()]
        nothing = torch.zeros(len(prefixes), dtype=torch.int64)
        at = Addresses(torch.tensor(prefixes, dtype=torch.int64), nothing, nothing, nothing, nothing.bool())
        clean = scores.to(device="cpu", dtype=torch.float32).contiguous()
        return self.noise.logits(clean, at, self.kernels).to(device=scores.device, dtype=scores.dtype)

    def _prefix(self, ids: list[int]) -> int:
        return signed(rolled(EMPTY, dropwhile(lambda token: token == self.padding, ids)))

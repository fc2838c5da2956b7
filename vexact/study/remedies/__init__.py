"""Remedies: what can be done about a sampler that is not the trainer.

A remedy (`vexact.model.remedy`) weighs tokens, leaves some out, centres scores, or decides about whole steps. "IS"
alone is never written: these are token TIS, sequence TIS and so on. Formula, source and default of each stand in its
docstring; where a paper was not to be had in full, what is written is our reading and says so. `remedy_of` makes the
one that a recipe describes.
"""

from vexact.model.remedy import Plain, Ratios, Remedy, Weighted
from vexact.study.remedies.lag import Centre, RatioWeight
from vexact.study.remedies.registry import REMEDIES, Weighing, make, remedy_of
from vexact.study.remedies.sequence import Bounds, NegativesMask, SequenceMask, SequenceRejection, SequenceTIS
from vexact.study.remedies.steps import MIPU, Resync, StepScaling, SurgeSchedule
from vexact.study.remedies.together import Together
from vexact.study.remedies.token import CIS, DPPO, IcePop, TokenRejection, TokenTIS

__all__ = [
    "CIS", "DPPO", "MIPU", "REMEDIES", "Bounds", "Centre", "IcePop", "NegativesMask", "Plain", "RatioWeight", "Ratios",
    "Remedy", "Resync", "SequenceMask", "SequenceRejection", "SequenceTIS", "StepScaling", "SurgeSchedule", "Together",
    "TokenRejection", "TokenTIS", "Weighing", "Weighted", "make", "remedy_of",
]  # fmt: skip

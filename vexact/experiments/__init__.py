"""Studies: many runs of one base recipe that differ in one thing each, and claims that they decide.

This is a floor of its own, above the loop and below the command line, beside reports. It trains through
`loop.train(recipe)` and nothing else: whatever differs between two arms is a key of their recipes, so no experiment can
reach into the engine, and each of its runs can be had again by itself. What it says of a run it reads off the run's
folder, so anyone's runs can be judged. Reports stand beside it and know its files only: a study can be judged without a
page being drawn, and a page drawn of results that somebody else has sent.

    study, reader     what a study is, and the YAML that says so
    recipes           an arm and a seed → recipe, digest, shared start
    worker, pool, reuse, progress, run   train what is missing, some at a time
    endpoints, lengths, distance, evidence   what a run comes to
    statistics, gaps, verdict, bits, steps, claims, judge   rules that were fixed beforehand, and their verdicts
    results, export   results.json, table.csv, curves.json.gz
"""

from vexact.experiments.export import export_study
from vexact.experiments.reader import load_study, seeds_of
from vexact.experiments.run import Outcome, dry_run, run_study, verdicts
from vexact.experiments.study import Study, StudyError
from vexact.experiments.worker import Computing

__all__ = [
    "Computing", "Outcome", "Study", "StudyError", "dry_run", "export_study", "load_study", "run_study", "seeds_of",
    "verdicts",
]  # fmt: skip

"""The page: all that it needs is in it, nothing in it comes from text unescaped, and any set of runs makes one."""

from __future__ import annotations

import html
import importlib.util
import json
import re
import shutil
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

import pytest

import runs
from made_studies import MadeArm, dose_arms, metric_lines, remedy_arms, write_run, write_study
from vexact import cli
from vexact.report import ReportError, write_report

VOID = {"meta", "br", "img", "link", "input", "hr"}


class Outline(HTMLParser):
    """Whether elements close in the order they were opened; ids, links and texts on the way."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.faults: list[str] = []
        self.ids: Counter[str] = Counter()
        self.names: Counter[str] = Counter()
        self.links: list[str] = []
        self.feed(page)
        self.faults += [f"{name} is not closed" for name in self.open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names[tag] += 1
        for name, value in attrs:
            self.ids.update([value or ""] if name == "id" else [])
            if name in ("href", "src", "action", "xlink:href"):
                self.links.append(value or "")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        if self.open and self.open[-1] == tag:
            self.open.pop()
        else:
            self.faults.append(f"</{tag}> in {self.open[-1:]}")


def page_of(*sources: Path, to: Path, png: bool = False) -> str:
    return write_report(sources, to, png=png).page.read_text(encoding="utf-8")


def faults(page: str) -> list[str]:
    """What keeps a page from standing alone or from being read."""
    outline = Outline(page)
    wrong = outline.faults + [f"id {name} twice" for name, count in outline.ids.items() if count > 1]
    wrong += [f"link {link}" for link in outline.links if not link.startswith("#")]
    wrong += [f"#{link[1:]} is nowhere" for link in outline.links if link[0] == "#" and link[1:] not in outline.ids]
    wrong += re.findall(r"https?://(?!www\.w3\.org/2000/svg)[^\s\"']*|@import|url\(|\bfetch\(|\bnan\b|XMLHttp", page)
    return wrong


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_study(
        tmp_path_factory.mktemp("study"), [*dose_arms((1e-3, 1e-1)), *remedy_arms()[:2]], seeds=2, steps=40
    )


@pytest.fixture(scope="module")
def page(study: Path) -> str:
    return page_of(study, to=study.parent / "report.html")


def test_the_page_stands_alone(page: str) -> None:
    assert faults(page) == []
    assert "default-src 'none'" in page


@pytest.mark.parametrize(
    "broken",
    [
        ("<main>", '<main><img src="https://example.org/x.png">'),
        ("<main>", "<main><p>"),
        ("<style>", "<style>@import 'x';"),
        ('id="arms"', 'id="by-step"'),
        ('href="#arms"', 'href="#nowhere"'),
    ],
)
def test_a_page_that_does_not_would_be_caught(page: str, broken: tuple[str, str]) -> None:
    assert faults(page.replace(*broken, 1)) != []


def test_every_section_is_there(page: str) -> None:
    outline = Outline(page)
    charts = ("success", "success-sampler", "k3", "delta-max", "grad-norm", "entropy", "ess", "reward", "dose",
              "dose-collapse", "gaps", "ess-collapse", "delta", "delta-probability")  # fmt: skip
    assert all(outline.ids[name] == 1 for name in (*charts, "claims", "tokens", "arms"))
    for verdict in ("confirmed here", "inconclusive", "opposite", "not testable by construction"):
        assert verdict in page
    assert "Large mismatch at the sampler lowers held-out success" in page


def test_every_chart_has_words_for_those_who_do_not_see_it(page: str) -> None:
    charts = re.findall(r'<svg class="chart[^>]*>(.*?)</svg>', page, re.DOTALL)
    assert len(charts) >= 14
    assert all(re.match(r"<title id=[^>]*>[^<]+</title><desc id=[^>]*>[^<]{20,}</desc>", chart) for chart in charts)


def test_light_dark_paper_and_small_screens_have_styles(page: str) -> None:
    for words in ("prefers-color-scheme:dark", "@media print", "max-width:700px", 'name="viewport"'):
        assert words in page


HOSTILE = "</script><script>alert('x')</script><b onload=x>"


def test_text_from_anywhere_is_escaped(tmp_path: Path) -> None:
    folder = write_study(tmp_path / "s", [MadeArm("exact", "exact"), MadeArm("a", label=HOSTILE, dose=0.1)], 2, 10)
    results = json.loads((folder / "results.json").read_text())
    results["title"] = results["question"] = HOSTILE
    results["claims"] = [dict.fromkeys(("id", "claim", "rule", "verdict"), HOSTILE) | {"numbers": {HOSTILE: HOSTILE}}]
    results["failed"] = [{"arm": HOSTILE, "seed": 0, "error": HOSTILE}]
    for endpoints in results["endpoints"].values():
        endpoints[HOSTILE] = [1.0, 2.0]
    (folder / "results.json").write_text(json.dumps(results))
    page = page_of(folder, to=tmp_path / "report.html")
    assert faults(page) == []
    assert Outline(page).names["script"] == 1 and "<b onload" not in page
    assert page.count("&lt;b onload=x&gt;") > 10, "the text is there, as text"


def test_sixty_arms_fit_and_can_be_told_apart(tmp_path: Path) -> None:
    doses = tuple(10 ** (-4 + 3 * i / 24) for i in range(25))
    folder = write_study(tmp_path / "s", [*dose_arms(doses), *remedy_arms()], seeds=2, steps=150)
    page = page_of(folder, to=tmp_path / "report.html")
    assert faults(page) == []
    assert len(page.encode()) < 3_000_000
    assert page.count('class="chip') == 60 and page.count(" on") > 0
    lit = re.findall(r'class="chip k(\d) on" data-a="(\d+)"', page)
    assert 2 <= len(lit) <= 8 and len({slot for slot, _ in lit}) == len(lit), "each its own colour"
    assert len(set(re.findall(r'figure id="(each-\d+)"', page))) == 60


def test_only_null_arms_that_the_grey_band_stands_for_are_hidden(tmp_path: Path) -> None:
    folder = write_study(tmp_path / "s", dose_arms((1e-2,)), seeds=2, steps=20, rollouts=False)
    results = json.loads((folder / "results.json").read_text())
    names = [arm["name"] for arm in results["arms"]]
    for arm in results["arms"]:
        arm["role"] = "exact" if arm["name"] == "sampler-0.01" else arm["role"]
        arm["beside"] = "sampler-0.01" if arm["name"] == "draws" else "exact"
    (folder / "results.json").write_text(json.dumps(results))
    hidden = re.findall(r'class="arm[^"]* of-null"[^>]* data-a="(\d+)"', page_of(folder, to=tmp_path / "report.html"))
    assert {names[int(place)] for place in hidden} == {"flip"}


@pytest.mark.parametrize("arms", [1, 2])
def test_few_plain_runs_make_a_page(tmp_path: Path, arms: int) -> None:
    folders = [write_run(tmp_path / f"run{i}", metric_lines(MadeArm("a"), i, i, 8, 4), 8, {}) for i in range(arms)]
    report = write_report(folders, tmp_path / "report.html", png=False)
    page = report.page.read_text()
    assert faults(page) == []
    assert "One seed shows what happened once" in page
    left_out = " ".join(report.left_out)
    assert "Gap to the exact arm: it needs an exact arm" in left_out
    assert "Distribution of Δ: no run has kept" in left_out
    assert all(line in html.unescape(page) for line in report.left_out)
    assert 'id="dose"' not in page and 'id="claims"' not in page


@pytest.mark.parametrize(
    "lines",
    [
        [],
        [{"step": 0}],
        [{"step": 0, "entropy": float("nan")}, {"step": 1, "entropy": float("inf")}],
        [{"step": 0, "tim/k3": 0.0, "eval_success": 0.0}],
        [{"step": 5, "grad_norm": 1e30}, {"step": 6, "grad_norm": 1e-30}],
    ],
)
def test_a_run_with_hardly_anything_makes_a_page(tmp_path: Path, lines: list[dict[str, float]]) -> None:
    page = page_of(write_run(tmp_path / "run", lines, 10, {}), to=tmp_path / "report.html", png=True)
    assert faults(page) == []


def test_a_run_without_any_line_yet_makes_a_page(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", [], 10, {})
    (folder / "metrics.jsonl").unlink()
    page = page_of(folder, to=tmp_path / "report.html")
    assert faults(page) == [] and "has no metrics.jsonl yet" in page


def test_a_real_run_makes_a_page_with_its_tokens(tmp_path: Path) -> None:
    recipe = runs.small_recipe(tmp_path / "real", tmp_path / "reward.py")
    runs.run(recipe)
    page = page_of(tmp_path / "real", to=tmp_path / "report.html")
    assert faults(page) == []
    outline = Outline(page)
    assert all(outline.ids[name] == 1 for name in ("k3", "delta", "tokens", "entropy", "k3-whole"))
    assert re.search(r"sampler -[\d.e-]+ \([0-9a-f]{8}\) · trainer", page)


def test_each_chart_has_an_image_beside_the_page(tmp_path: Path, study: Path) -> None:
    report = write_report([study], tmp_path / "report.html")
    assert {path.parent for path in report.images} == {tmp_path / "report-figures"}
    assert {"success.png", "dose.png", "gaps.png", "delta.png"} <= {path.name for path in report.images}
    assert all(path.read_bytes()[:4] == b"\x89PNG" for path in report.images)


def test_a_report_is_a_function_of_its_runs(study: Path, page: str, tmp_path: Path) -> None:
    assert page_of(study, to=tmp_path / "again.html") == page


def test_what_rollouts_gave_can_be_kept_for_a_study_without_them(tmp_path: Path, study: Path, page: str) -> None:
    away = tmp_path / "away"
    shutil.copytree(study, away)
    write_report([study], tmp_path / "r.html", png=False, keep=away / "deltas.json.gz")
    for folder in away.glob("runs/*/rollouts"):
        shutil.rmtree(folder)
    there = page_of(away, to=tmp_path / "report.html")
    section = lambda text, id: text.split(f'id="{id}"')[1].split("</section>")[0]  # noqa: E731
    assert all(section(there, id) == section(page, id) for id in ("deltas", "tokens"))
    (away / "deltas.json.gz").unlink()
    assert 'id="tokens"' not in page_of(away, to=tmp_path / "without.html")


@pytest.mark.parametrize(("package", "words"), [("jinja2", "vexact\\[report\\]"), ("matplotlib", "or --no-png")])
def test_what_is_not_installed_is_said(
    monkeypatch: pytest.MonkeyPatch, study: Path, tmp_path: Path, package: str, words: str
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == package else found(name, *rest)
    )
    with pytest.raises(ReportError, match=f"{package} is not installed: pip install .*{words}"):
        write_report([study], tmp_path / "report.html")


def test_the_command_writes_the_page_and_says_where(
    study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["report", str(study), "-o", str(tmp_path / "r.html"), "--no-png"]) == 0
    assert str(tmp_path / "r.html") in capsys.readouterr().out and (tmp_path / "r.html").is_file()
    assert cli.main(["report", str(tmp_path / "nowhere")]) == 2
    assert "nowhere: no such folder" in capsys.readouterr().err
    assert cli.main(["report", str(study), "-o", str(tmp_path)]) == 2
    assert "is no place for a file" in capsys.readouterr().err

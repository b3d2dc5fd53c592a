"""The pages that commands write: whole, safe, of the numbers that are printed, and the pieces that
notebooks show."""

import html.parser
import os
import re
import shlex
import sys

import numpy as np
import pytest

import autopack
from autopack import tiny
from autopack.auditing.report import LeakReport, ModeResult
from autopack.bench.compare import ARMS, Comparison
from autopack.bench.race import Outcome
from autopack.cli import main
from autopack.pages import parts


def bare_result(name="a llama"):
    """A result of a machine and a model of which only what has to be is known."""
    outcomes = [Outcome(arm, 7, 4.0, True, seconds=[1.0, 1.1, 1.2]) for arm in ARMS]
    about = {
        "name": name,
        "dtype": "float32",
        "source": "some",
        "parameters": 1e6,
        "attention": "sdpa",
    }
    about |= {"work": "steps", "device": "A CPU", "threads": 1, "torch": "2", "transformers": "5"}
    return Comparison(about, [[3, 4]], 0.125, outcomes)


VOID = {"meta"}


class Page(html.parser.HTMLParser):
    """Content of an HTML page: tags with attributes, texts, and the cells of its tables."""

    def __init__(self, text):
        super().__init__()
        self.tags = []
        self.open = []
        self.texts = []
        self.tables = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.texts.append(data)
        if {"td", "th"} & set(self.open):
            self.tables[-1][-1][-1] += data

    @property
    def drawn(self):
        """Number of the page's SVG figures."""
        return sum(tag == "svg" for tag, _ in self.tags)


def check_self_contained(text):
    """Return a page, parsed; raise `AssertionError` if it refers to anything outside of it."""
    page = Page(text)
    forbidden = "script link img image iframe object embed base"
    assert {tag for tag, _ in page.tags}.isdisjoint(forbidden.split())
    ids = [attributes["id"] for _, attributes in page.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    for tag, attributes in page.tags:
        assert not any(name.startswith("on") or name == "src" for name in attributes), (
            tag,
            attributes,
        )
        for name, value in attributes.items():
            if name == "href":
                assert str(value).removeprefix("#") in ids, value
            assert {each[1:] for each in re.findall(r"url\(([^)]*)\)", value or "")} <= set(ids)
    assert not re.search(r"(https?:)?//\w|data:|@import", text)
    return page


Figure = pytest.importorskip("matplotlib.figure").Figure
HOSTILE = "<script>alert('1')</script>&\"$x_{$ ]]> --> {{ 7*7 }}"
LEAKING = np.array([[np.nan, 0.0], [0.7, np.nan]])
RESULTS = [
    ModeResult("default", False, error=2e-6, influence=LEAKING * 1e-6, gradient=3e-6, loss=1e-7),
    ModeResult("all-ones mask", True, error=0.9, influence=LEAKING, gradient=0.5, loss=0.01),
    ModeResult("two rows", False, error=0.0, loss=float("nan")),
    ModeResult("segment ids", False, failure=f"ValueError: {HOSTILE}"),
]


def report(*results, **changes):
    options = {"model": HOSTILE, "implementation": "sdpa", "enabled": False, "dtype": "float32"}
    options |= {
        "lengths": (7, 12),
        "tolerance": 1e-4,
        "gradient_tolerance": 1e-3,
        "loss_tolerance": 1e-3,
    }
    return LeakReport(**{**options, **changes}, results=list(results))


def lengths(count=300):
    return np.random.default_rng(0).lognormal(4, 1, count).astype(int).clip(1, 512)


def words(printed):
    """The cells of printed lines, which two spaces at least keep apart."""
    return [re.split(r" {2,}", line.strip()) for line in printed.splitlines()]


# The three commands


def written(command, folder, capsys, status=0):
    """The page that a command writes beside a picture, and what it prints."""
    page, picture = folder / "page.html", folder / "picture.png"
    page.write_text("old")
    assert main([*command, "--html", str(page), "--plot", str(picture)]) == status
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 10_000
    printed = capsys.readouterr().out
    assert f"Page: {page}" in printed
    return check_self_contained(page.read_text()), printed


def test_estimate_writes_a_page_with_the_tables_that_it_prints(tmp_path, capsys):
    file = tmp_path / "l.npy"
    np.save(file, lengths())
    command = f"estimate {file} --max-length 256 --hidden-size 1024"
    found, printed = written(command.split(), tmp_path, capsys)
    for part in (
        "300 documents",
        "truncated",
        "grouped by length",
        "mini-batch of 8",
        "best_fit",
        "1 / 12,288",
    ):
        assert part in printed
    padded, packed, made = found.tables
    assert len(padded) == 7
    assert len(packed) == 5
    for row in [*padded[1:], *packed[1:]]:
        assert row in words(printed)
    facts = dict(made)
    assert facts["command"].startswith(f"autopack {command} --html {tmp_path}")
    assert autopack.__version__ in facts["versions"]
    assert found.drawn == 1


def test_audit_of_a_saved_model_writes_a_page_with_the_table_that_it_prints(tmp_path, capsys):
    tiny.build("qwen3").save_pretrained(tmp_path / "model")
    found, printed = written(
        ["audit", str(tmp_path / "model"), "--stock"], tmp_path, capsys, status=1
    )
    table, made = found.tables
    assert [[cell for cell in row if cell] for row in table] == words(printed)[2 : 2 + len(table)]
    assert found.drawn == 1
    facts = dict(made)
    assert "Qwen3ForCausalLM (qwen3), stock, not enabled, sdpa, float32: LEAKS" in found.texts
    assert "transformers" in facts["versions"]


def test_bench_writes_a_page_with_the_table_that_it_prints(tmp_path, capsys):
    quick = "--size tiny --max-length 40 --batch-size 3 --seconds 1 --forward".split()
    found, printed = written(["bench", "roberta", *quick], tmp_path, capsys)
    table, made = found.tables
    assert len(table) == 4
    for row in table[1:]:
        assert " ".join(row).split() in [line.split() for line in printed.splitlines()]
        assert row[0] in found.texts, "the name of the arm, in the figure"
    text = " ".join(found.texts)
    assert "forward passes, no gradients" in text
    assert any(said.startswith("roberta, tiny, random, ") for said in found.texts)
    assert dict(made)["command"].startswith("autopack bench roberta --size tiny")
    assert found.drawn == 1


# Figures


def drawn(chart):
    """The axes that a chart was drawn on."""
    axes = Figure().subplots()
    chart.draw(axes)
    return axes


def test_limits_of_padded_batches_are_their_own():
    """Gradients of padded batches are held to float32 in any precision."""
    padded = ModeResult(
        "right-padded", False, error=5e-5, gradient=5e-4, kind="padded", unpadded=True
    )
    subject = report(RESULTS[0], padded, gradient_tolerance=1e-6)
    assert [subject.is_exact(result) for result in subject.results] == [False, True]


def test_lengths_and_expected_speeds_are_drawn_as_they_are():
    found = autopack.estimate(lengths(), 512)
    histogram, speed = map(drawn, found._charts())
    assert sum(bar.get_height() for bar in histogram.patches) == 300
    assert [bar.get_width() for bar in speed.patches] == [arm.speedup for arm in found._compared]
    said = [text.get_text() for text in speed.texts]
    assert said == [f"{arm.speedup:.2f} x" for arm in found._compared]
    assert all(text in found._repr_html_() for text in said)


def test_speeds_are_drawn_as_they_were_measured():
    result = bare_result()
    for number, outcome in enumerate(result.outcomes):
        outcome.seconds = [1.0 + number + noise for noise in (0.0, 0.01, 0.02, 0.03, 0.04, 0.05)]
    _, (table,), (chart,), _ = result._sections()
    speeds = drawn(chart)
    assert [bar.get_width() for bar in speeds.patches] == [
        each.speed.median for each in result.outcomes
    ]
    assert [text.get_text() for text in speeds.texts] == [row[2] for row in table.rows[1:]]


def test_the_path_of_a_model_in_a_picture_is_no_formula(tmp_path):
    bare_result(name=f"{HOSTILE}\x1b\udcff").plot().savefig(tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 10_000


# Safety


def test_hostile_names_are_texts(tmp_path):
    subject = report(*RESULTS)
    page = check_self_contained(parts.whole(HOSTILE, [(HOSTILE, HOSTILE)], subject._repr_html_()))
    assert page.texts.count(HOSTILE) == 4, "title, heading, and both sides of a fact"
    assert any(f"ValueError: {HOSTILE}" in text for text in page.texts)
    assert sum(HOSTILE in text for text in page.texts) == 6, (
        "those, headline and error; the caption has it in lines"
    )
    assert sum("<script>alert" in text for text in page.texts) == 7


def test_arms_that_failed_say_so_whatever_their_errors_hold():
    result = bare_result()
    for outcome in result.outcomes[1:]:
        outcome.failed, outcome.seconds = f"\x1b[31m{HOSTILE}\x00\udcff", []
    page = check_self_contained(result._repr_html_())
    assert [row[-1] for row in page.tables[0][2:]] == [
        outcome.failed for outcome in result.outcomes[1:]
    ]
    assert page.drawn == 1
    result.outcomes[0].failed = "out of memory"
    assert check_self_contained(result._repr_html_()).texts.count("out of memory") >= 2


def test_an_audit_of_nothing_and_infinite_errors_are_shown():
    check_self_contained(report()._repr_html_())
    worst = ModeResult(
        "default",
        False,
        error=float("inf"),
        influence=np.array([[np.nan, 0.0], [np.inf, np.nan]]),
        gradient=float("inf"),
    )
    page = check_self_contained(report(worst, tolerance=2.0)._repr_html_())
    assert page.tables[0][1].count("inf") == 3, "error, influence and gradients"
    assert page.drawn == 1


@pytest.mark.skipif(sys.platform != "linux", reason="names of files are bytes on Linux")
@pytest.mark.parametrize("name", ["<b>$x_{$ & 'é.npy", os.fsdecode(b"l\xff.npy")])
def test_hostile_paths_are_texts(name, tmp_path, capsys):
    """Even one that is no text."""
    np.save(tmp_path / name, lengths(20))
    page = tmp_path / "page.html"
    assert main(["estimate", str(tmp_path / name), "--html", str(page), "--json"]) == 0
    assert capsys.readouterr().out.startswith("{")
    command = dict(check_self_contained(page.read_text()).tables[-1])["command"]
    assert (
        shlex.split(command)[2] == str(tmp_path / name).encode("utf-8", "backslashreplace").decode()
    )


def test_a_page_forbids_what_it_does_not_need():
    page = Page(parts.whole("a", [], ""))
    policy = [
        a["content"]
        for tag, a in page.tags
        if tag == "meta" and a.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy == ["default-src 'none'; style-src 'unsafe-inline'"]
    assert ("meta", {"name": "color-scheme", "content": "light dark"}) in page.tags


@pytest.mark.parametrize("planted", ["<p>", "<a href='#nowhere'>a</a>", "<img src='a.png'>", "<p>https://a.b</p>",
                                     "<b onclick='a'>a</b>", "<b style='fill:url(#x)'></b>"])  # fmt: skip
def test_what_a_page_must_not_hold_is_found(planted):
    with pytest.raises(AssertionError):
        check_self_contained(parts.whole("a", [], planted))


# Notebooks


def test_notebooks_show_the_same_pieces(tmp_path):
    file, page = tmp_path / "l.npy", tmp_path / "page.html"
    np.save(file, lengths())
    assert main(["estimate", str(file), "--max-length", "512", "--html", str(page)]) == 0
    shown = autopack.estimate(str(file), 512)._repr_html_()
    assert shown in page.read_text()
    check_self_contained(shown)
    with autopack.enable(tiny.build("llama")) as handle:
        check_self_contained(handle._repr_html_())


def test_two_results_in_a_notebook_do_not_share_what_their_figures_name():
    first, second = (autopack.estimate(lengths(), most)._repr_html_() for most in (256, 512))
    check_self_contained(first + second)
    assert "id=" in first


def test_without_matplotlib_the_tables_are_there_and_the_lack_is_said(monkeypatch):
    with_figures = autopack.estimate(lengths(), 512)._repr_html_()
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    without = autopack.estimate(lengths(), 512)._repr_html_()
    page = check_self_contained(without)
    assert page.drawn == 0
    assert "matplotlib is not installed" in without
    assert "matplotlib is not installed" not in with_figures
    assert page.tables == Page(with_figures).tables

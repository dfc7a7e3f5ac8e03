"""What to fix first, in the page: a card per finding; a click shows its evidence on the timeline."""

from __future__ import annotations

from html import escape
from typing import TYPE_CHECKING

from traceloom.model import units
from traceloom.model.finding import HotFrame
from traceloom.report.views.html.absence import Reasons
from traceloom.report.views.html.text import prose, text

if TYPE_CHECKING:
    from traceloom.report.documents import ReportDocument
    from traceloom.report.documents.report import FindingEvidenceRow, FindingRow


def findings(document: ReportDocument, reasons: Reasons) -> str:
    """The list of findings; one line that says why there are none."""
    rows = document.get("findings") or []
    if not rows:
        return reasons.line("findings", "Findings")
    context = document.get("findings_ground")
    hint = ""
    if context and not context["holds"]:
        hint += f'<p class="quiet">Take the savings as hints: {prose(context["law"])}</p>'
    if context and context["limit"]:
        hint += f'<p class="quiet">Of savings: {prose(context["limit"])}.</p>'
    positions = {rank.get("rank"): k for k, rank in enumerate(document["ranks"])}
    cards = "".join(_card(row, positions) for row in rows)
    if context:
        hint += f'<p class="quiet">Savings {prose(context["basis"])}, by re-timing; they do not overlap.</p>'
    if any(row["host_ns"] for row in rows) and not (context and context["stacks"]):
        hint += '<p class="quiet">Which code holds the host: record with <code>--stacks</code>.</p>'
    abstained = ""
    if abstentions := context["abstentions"] if context else []:
        reason_of = {row["slug"]: row["reason"] for row in abstentions}
        items = "".join(f"<li>{text(slug)}: {prose(reason)}</li>" for slug, reason in reason_of.items())
        abstained = f"<details><summary>Checks that were skipped ({len(abstentions)})</summary>"
        abstained += f'<ul class="quiet">{items}</ul></details>'
    return f'{hint}<ol class="findings">{cards}</ol>{abstained}'


def _card(row: FindingRow, positions: dict[int | None, int]) -> str:
    of_time = row["list"] == "time"
    if of_time:
        figure = ("≥ " if row["lower_bound"] else "") + units.share(row["saving_fraction"] or 0, 1)
        saved = units.duration(row["saving_ns"])
    else:
        figure = "risk" if row["saving_bytes"] is None else units.size(row["saving_bytes"])
        saved = "memory"
    if of_time and row["saving_low_ns"] is not None:
        saved += f" ({units.duration(row['saving_low_ns'])} to {units.duration(row['saving_high_ns'])})"
    if of_time and not row["saving_ns"]:
        figure, saved = "note", "saves nothing on its own"
    width = min(row["saving_fraction"] or 0, 1) * 100
    bar = (
        '<svg class="saving" viewBox="0 0 100 4" preserveAspectRatio="none" aria-hidden="true">'
        f'<rect width="{width:.2f}" height="4"/></svg>'
    )
    risk = f'<p class="risk">{prose(row["risk"])}</p>' if row["risk"] else ""
    others = "".join(
        f"<li>{prose(other['title'])} ({escape(units.duration(other['alone_ns']))})</li>"
        for other in row["alternatives"]
    )
    alternatives = f'<p class="quiet">Or, for the same time:</p><ul class="quiet">{others}</ul>' if others else ""
    frames = ""
    for frame in (HotFrame(**frame) for frame in row["frames"]):
        where = "" if frame.file is None else f" <code>{text(frame.file)}:{frame.line}</code>"
        mostly = "" if frame.inside is None else f", mostly <code>{text(frame.inside)}</code>"
        frames += (
            f"<li><b>{escape(units.duration(frame.time_ns))}</b> of host time ({escape(units.share(frame.share, 1))}) "
            f"in <code>{text(frame.name)}</code>{where}{mostly}{frame.of_ranks}</li>"
        )
    held = f'<ul class="frames">{frames}</ul>' if frames else ""
    alone = "" if row["alone_ns"] in (None, row["saving_ns"]) else f" · alone {units.duration(row['alone_ns'])}"
    return (
        f'<li class="finding {text(row["severity"])}">'
        f'<p class="figure"><b>{escape(figure)}</b> <span class="quiet">{escape(saved)}</span></p>{bar}'
        f'<p class="title">{prose(row["title"])}</p><p>{prose(row["advice"])}</p>{risk}{alternatives}{held}'
        f'<ul class="evidence">{"".join(_evidence(evidence, positions) for evidence in row["evidence"])}</ul>'
        f'<p class="quiet"><a href="{text(row["learn_more"])}" target="_blank" rel="noreferrer">What '
        f"{text(row['slug'])} means</a> · confidence {row['confidence']:.1f}{alone} · "
        f"evaluated: {prose(row['change'] or 'no change')}</p></li>"
    )


def _evidence(evidence: FindingEvidenceRow, positions: dict[int | None, int]) -> str:
    long = evidence["duration_ns"] if evidence["duration_ns"] is not None else evidence["total_ns"]
    size = "" if long is None else f" ({escape(units.duration(long))})"
    count = f"{units.count(evidence['count'])} × " if evidence["count"] > 1 else ""
    description = f"{escape(count)}{prose(evidence['what'])}{size}"
    if evidence["start_ns"] is None or evidence["duration_ns"] is None:
        return f"<li>{description}</li>"
    end = evidence["start_ns"] + max(evidence["duration_ns"], 1)
    rank = positions.get(evidence["rank"], 0)
    return (
        f'<li><a href="#timeline" data-rank="{rank}" data-range="{evidence["start_ns"]}-{end}">{description}</a></li>'
    )

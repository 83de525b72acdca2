"""Plain text of a page of the Wikipedia dump that the track's text was made of.

The pages of chinapedia/wikipedia.abstract.en are what pandoc writes for wiki markup: bold words in
capitals, tables drawn with lines, numbers of footnotes in brackets, and remains of captions and of
templates. `make_text` mends what these rules leave with the edits of articles.jsonl. An edit is a
position in the text of these rules, so that no rule may change without them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

LONGEST = 60_000
"""Characters of an article, at most: blocks beyond them are left out."""
LEFT_OUT = frozenset(
    "references|see also|external links|notes|further reading|bibliography|discography|filmography"
    "|cast|gallery|sources|publications|notes and references|awards and nominations"
    "|selected works|track listing|footnotes|charts|citations|literature|selected bibliography"
    "|personnel|selected publications".split("|")
)
"""Sections of lists and sources, which are left out."""
LOWER = frozenset("of the and in van von ibn or for to at on a an by de".split())
"""Words of a name that begin with a small letter."""
LEAST_INDENTED = 60
"""Characters of an indented line that is a quotation; shorter lines are code or verses."""
BOLD_BLOCKS = 2
"""Blocks at the start of an article in which capitals are bold words."""
SHORTEST_NAME = 7
"""Characters of several words in capitals, at least, that are a name and no abbreviation."""

_CAPITALS = "A-ZÀ-ÖØ-ÞĀ-Ž"
_WORD = f"[{_CAPITALS}][{_CAPITALS}0-9]*"
_NAME = re.compile(f"(?<!\\w){_WORD}(?: {_WORD})+|(?<!\\w){_WORD}(?!\\w)")
_SUFFIX = r"\.(?:jpe?g|JPE?G|png|PNG|svg|gif|tif|ogg|OGG)"
_FILE_LINE = re.compile(rf"(?:\[\[)?(?:File|Image):|\S+{_SUFFIX}\b|[^|]{{1,100}}{_SUFFIX}\|")
_FILE_NAME = re.compile(rf"(?<=[\] ])[^\s\]]+{_SUFFIX}\b.*")
_TABLE_LINE = re.compile(r"\s*[+|]|\[TABLE\]")
_TEMPLATE_LINE = re.compile(r"\{\{|.*(?:\|\s*\w+ *= |style=)")


def clean(page: str, title: str) -> str:
    """Return the text of `page`: blocks between empty lines, headings as `= Heading =`."""
    blocks: list[str] = []
    for block in _without_empty_sections(_blocks(page, title)):
        if sum(map(len, blocks)) + 2 * len(blocks) + len(block) > LONGEST:
            break
        blocks.append(block)
    while blocks and _is_heading(blocks[-1]):
        blocks.pop()
    return "\n\n".join(blocks)


def restore_case(text: str, title: str) -> str:
    """Return `text` with names in capitals written as in `title`, or with capitals at the start.

    One word in capitals may be an abbreviation, and is changed if it is a word of `title`.
    """
    title = re.sub(r" \(.*\)$", "", title)
    words = [word.strip(",.:") for word in re.split("[ –]", title)]
    written = {word.upper(): word for word in words if len(word) > 2 or word.isupper()}

    def word_of_name(word: str, *, first: bool) -> str:
        if word in written or len(word) == 1:
            return written.get(word, word)
        return word.lower() if word.lower() in LOWER and not first else word.title()

    def name(found: re.Match[str]) -> str:
        capitals = found.group()
        if " " not in capitals:
            return written.get(capitals, capitals) if len(capitals) > 1 else capitals
        if len(capitals) < SHORTEST_NAME:
            return capitals
        before, whole, after = f" {capitals} ".partition(f" {title.upper()} ")
        parts = [word_of_name(word, first=not n) for n, word in enumerate(before.split())]
        parts += [title] if whole else []
        parts += [word_of_name(word, first=False) for word in after.split()]
        return " ".join(parts)

    return _NAME.sub(name, text)


def _blocks(page: str, title: str) -> Iterator[str]:
    """Yield the headings and the blocks of text of a page."""
    bold = BOLD_BLOCKS
    left_out = table = False
    gaps_and_blocks = ["", *re.split(r"\n\n(\n*)", page)]
    for gap, block in zip(gaps_and_blocks[::2], gaps_and_blocks[1::2], strict=True):
        # Two empty lines come before a heading, and before verses, which are indented.
        if gap and block and "\n" not in block.strip("\n") and not block.startswith(" "):
            heading = re.sub(r"\[\w{1,3}\]", "", block).strip()
            left_out = heading.lower() in LEFT_OUT
            bold = 0
            if not left_out:
                yield f"= {heading} ="
            continue
        if left_out or not block:
            continue
        table = table and block.startswith("  ")  # A blank line may part the rows of a table.
        lines, table = _text_lines(block, table=table)
        text = _without_markup("\n".join(lines))
        if re.search(r"\w", text):
            yield restore_case(text, title) if bold else text
            bold = max(0, bold - 1)


def _text_lines(block: str, *, table: bool) -> tuple[list[str], bool]:
    """Return the lines of a block that are text, and whether a table goes on after them."""
    lines: list[str] = []
    for line in block.split("\n"):
        table = table or re.match(r"\s*-{3,}", line) is not None
        if table or _is_no_text(line):
            continue
        line = re.sub(r" *Category:.*", "", _FILE_NAME.sub("", line))
        lines.append(re.sub(r"\A.*?\]\] *", "", line))  # The end of a caption.
    return lines, table


def _is_no_text(line: str) -> bool:
    item = re.match(r"\s*(?:-|\d+\.) ", line) is not None
    columns = re.search(r"\S {4,}\S", line) is not None and not item
    code = re.match(r" {4}", line) is not None and not item and len(line.strip()) < LEAST_INDENTED
    return (
        columns
        or code
        or re.search(r"[^\W\d_]", line) is None
        or any(kind.match(line) for kind in (_TABLE_LINE, _FILE_LINE, _TEMPLATE_LINE))
    )


def _without_markup(text: str) -> str:
    text = re.sub(r"\[(?:\d+|[a-z]|note \d+)\]", "", text)
    text = re.sub(r"\[\[|__NOTOC__|__TOC__", "", text.replace("\xa0", " "))
    text = re.sub(r" *\n *", "\n", re.sub(r"[ \t]+", " ", text)).strip()
    text = re.sub(r"(?<!\w)_([^_\n]{1,200})_(?!\w)", r"\1", text)
    text = re.sub(r"'''|''", "", text)
    text = re.sub(r" +([,.;:)])", r"\1", text)
    text = re.sub(r" +", " ", re.sub(r"\( *[,;]?\)", "", text))  # Pronunciations, now empty.
    return re.sub("[\u2000-\u200a\u202f\u205f]", " ", text).strip()  # Spaces of formulae.


def _without_empty_sections(blocks: Iterator[str]) -> Iterator[str]:
    heading = None
    for block in blocks:
        if _is_heading(block):
            heading = block
            continue
        if heading:
            yield heading
        heading = None
        yield block


def _is_heading(block: str) -> bool:
    return block.startswith("= ") and block.endswith(" =")

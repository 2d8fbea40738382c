"""Sentences of posts, tokenised.

Source: the text is treated as TFF's `stackoverflow.load_data` documents: lower case,
HTML unescaped, non-ASCII symbols removed, every punctuation mark a token except
apostrophes and hyphens, no extra whitespace, links replaced by `<URL>`.

Not guaranteed: that sentences end where they do in TFF's data; its rule is not public.
"""

import html.parser
import re

_URL = "<URL>"
# The end of a sentence is followed by something else than a small letter; a full stop
# behind a lone letter or digit (e.g., i.e., initials, lists) ends none.
_END = re.compile(
    r"""(?<![.!?])(?:(?<!\b[A-Za-z0-9])\.|[!?])[.!?]*+["')\]]*+\s++(?![a-z])"""
)
_TOKEN = re.compile(
    r"""(?:(?:https?|ftp)://|www\.)[^\s<>"]*[^\s<>"'.,;:!?)\]}]"""
    r"|[a-z0-9'-]+"
    r"|[!-/:-@\[-`{-~]"
)
_PARAGRAPHS = frozenset(
    "blockquote br dd div dl dt h1 h2 h3 h4 h5 h6 hr li ol p pre table td th tr "
    "ul".split()
)
_LEFT_OUT = frozenset({"code", "pre", "script", "style"})


def extract_sentences(body: str) -> list[list[str]]:
    """Returns the tokens of each sentence of a post. Code is left out.

    A sentence never goes over the end of a paragraph or of a list's item.

    Args:
        body: HTML.

    Returns:
        The sentences in order, none empty.

    Raises:
        ValueError: If the body has a declaration that html.parser cannot read.
    """
    parser = _TextParser()
    try:
        parser.feed(body)
        parser.close()
    except AssertionError as error:
        raise ValueError(f"the text must be HTML. Found {error}.") from error
    parser.end_paragraph()
    sentences = (
        tokenize(text)
        for paragraph in parser.paragraphs
        for text in _split(_remove_non_ascii(paragraph))
    )
    return [tokens for tokens in sentences if tokens]


def tokenize(text: str) -> list[str]:
    """Returns the tokens of a text in lower case; a link is `<URL>`."""
    tokens = _TOKEN.findall(_remove_non_ascii(text).lower())
    return [
        _URL if "://" in token or token.startswith("www.") else token
        for token in tokens
    ]


class _TextParser(html.parser.HTMLParser):
    """Collects the paragraphs of a post, with single spaces."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.paragraphs: list[str] = []
        self._pieces: list[str] = []
        self._depth = 0

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag in _LEFT_OUT:
            self._depth += 1
            self._pieces.append(" ")
        if tag in _PARAGRAPHS:
            self.end_paragraph()

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        if tag in _PARAGRAPHS:
            self.end_paragraph()

    def handle_endtag(self, tag: str) -> None:
        if tag in _LEFT_OUT:
            self._depth = max(0, self._depth - 1)
        if tag in _PARAGRAPHS:
            self.end_paragraph()

    def handle_data(self, data: str) -> None:
        if not self._depth:
            self._pieces.append(data)

    def end_paragraph(self) -> None:
        text = " ".join("".join(self._pieces).split())
        if text:
            self.paragraphs.append(text)
        self._pieces.clear()


def _split(paragraph: str) -> list[str]:
    """Returns the sentences of an ASCII text."""
    sentences, start = [], 0
    for match in _END.finditer(paragraph):
        sentences.append(paragraph[start : match.end()])
        start = match.end()
    return [*sentences, paragraph[start:]]


def _remove_non_ascii(text: str) -> str:
    # Spaces of other kinds divide words too.
    return " ".join(text.split()).encode("ascii", "ignore").decode("ascii")

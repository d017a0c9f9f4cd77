"""The corpora that protocols name, and the files that a user gives for them.

=============  =================================================================================================
name           files
=============  =================================================================================================
python-docs    none: the embedded corpus
enwik8         a slice of it: the last 5 % are test, the 5 % before them valid
tinystories    files of stories, cut the same way after whole stories
others         three files: train, val, test
=============  =================================================================================================
"""

from collections.abc import Sequence
from pathlib import Path

from benchmarks.pipeline_corpora import Corpus, enwik8, tinystories
from benchmarks.study.protocol import ProtocolError
from lightning_blocktrain import ByteDataModule

EMBEDDED = "python-docs"


def corpora_of(names: Sequence[str], told: Sequence[str], folder: Path) -> dict[str, Corpus]:
    """Return the named corpora, cut into files in ``folder`` where they come as one.

    Args:
        names: Those that a protocol names.
        told: ``NAME=FILE`` or ``NAME=FILE,FILE,...``, as on the command line.
        folder: For the parts.

    Raises:
        ProtocolError: If a corpus has no files, or files have no corpus.
    """
    files = dict(_pair(text) for text in told)
    if strange := files.keys() - set(names):
        raise ProtocolError(
            f"--corpus must name a corpus of the study: {', '.join(names)}; got {min(strange)}; drop it"
        )
    return {name: _corpus(name, files.get(name, []), folder) for name in names}


def _pair(text: str) -> tuple[str, list[str]]:
    name, equals, files = text.partition("=")
    if not (name and equals and files):
        raise ProtocolError(f"--corpus must be NAME=FILE[,FILE...]; got {text!r}; name the corpus and its files")
    found = files.split(",")
    for file in found:
        if not Path(file).is_file():
            raise ProtocolError(f"--corpus must name files; got {file!r} for {name}; correct the path")
    return name, found


def _corpus(name: str, files: list[str], folder: Path) -> Corpus:
    if name == EMBEDDED:
        return Corpus(name, {"corpus": EMBEDDED})
    if not files:
        raise ProtocolError(f"the study needs {name}; got no files; add --corpus {name}=FILE[,FILE...]")
    if name == "enwik8" and len(files) == 1:
        return enwik8(files[0], folder)
    if name == "tinystories":
        return tinystories(files, folder)
    if len(files) != 3:
        raise ProtocolError(f"{name} must have three files: train, val, test; got {len(files)}; name all three")
    return Corpus(name, dict(zip(("train", "val", "test"), (str(Path(file).resolve()) for file in files), strict=True)))


def sha256_of(corpus: Corpus) -> str:
    """Return the hash by which rows name a corpus."""
    data = ByteDataModule(window_bytes=64, batch_size=1, **corpus.options)  # type: ignore[arg-type]
    data.prepare_data()
    data.setup("fit")
    return data.corpus_info.sha256

"""An entry's master as whoever asks wants it: as it is, or in the form of a codec.

Owns the encoded forms of the newest version of each entry, which many workers ask for: each is made once. Owns no
version and no master (those are the ledger's).

Memory: of each entry the last ``KEPT_FORMS`` forms that somebody asked for, until the next version is asked for.
"""

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from lightning_blocktrain.errors import RequestRefusedError
from lightning_blocktrain.rounds.codecs import Codec
from lightning_blocktrain.rounds.values import check_value_codec, encode_values

KEPT_FORMS = 2
"""A run has one; whoever asks for many must not fill the memory."""


@dataclass(frozen=True, eq=False)
class Master:
    """A version of an entry, not to be written to.

    Args:
        version: Of the tensors.
        tensors: By name; in the form of a codec by part and name.
        meta: The codec; empty: they are as they are.
    """

    version: int
    tensors: Mapping[str, Tensor] = field(repr=False)
    meta: Mapping[str, str] = field(default_factory=dict)


class EncodedMasters:
    """The masters of a run in the forms that workers ask for.

    Args:
        spared: Names of tensors that travel as they are in every codec.
    """

    def __init__(self, spared: Collection[str]) -> None:
        self._spared = tuple(spared)
        self._forms: defaultdict[str, dict[tuple[Codec, bool], Master]] = defaultdict(dict)

    def of(
        self, entry: str, version: int, master: Mapping[str, Tensor], codec: Codec | None, average: bool = False
    ) -> Master:
        """Return a master, or its running average, in the form of a codec; None: as it is.

        Raises:
            RequestRefusedError: If the codec can carry no values.
        """
        if codec is None:
            return Master(version, master)
        try:
            check_value_codec("codec", codec)
        except ValueError as exc:
            raise RequestRefusedError(str(exc)) from exc
        key = replace(codec, spared=self._spared), average
        forms = self._forms[entry]
        for known in [known for known, form in forms.items() if form.version != version]:
            del forms[known]
        if key not in forms:
            for known in [*forms][: len(forms) + 1 - KEPT_FORMS]:
                del forms[known]
            encoded = encode_values(key[0], master)
            forms[key] = Master(version, encoded.tensors, encoded.meta)
        return forms[key]

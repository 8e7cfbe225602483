"""What a team of ranks agrees on before it writes."""

import pytest

from export import export_collection
from export.errors import ExportError
from export.team import Alone
from tests.modules import plain_collection


class Pair(Alone):
    """A team of two, whose second rank says of itself what the first does, but for one option."""

    def __init__(self, **differs):
        self.differs = differs

    def together(self, work):
        mine = work()
        return [mine, mine | self.differs]


@pytest.mark.parametrize(
    ("differs", "message"),
    [
        ({"name": "d"}, "name: rank 0 was given 'c' and rank 1 'd'; give every rank the same"),
        ({"version": 3}, "version: rank 0 was given None and rank 1 3; give every rank the same"),
        ({"row_dtype": "int8"}, "row_dtype: rank 0 was given 'fp32' and rank 1 'int8'; give every rank the same"),
    ],
)
def test_ranks_that_were_given_different_options_write_nothing(tmp_path, differs, message):
    with pytest.raises(ExportError) as refused:
        export_collection(plain_collection(), tmp_path / "repo", name="c", team=Pair(**differs))
    assert str(refused.value) == message
    assert not (tmp_path / "repo").exists()

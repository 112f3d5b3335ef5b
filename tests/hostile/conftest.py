"""The lab, built once for all tables."""

import pytest

from tests.hostile import lab as laboratory
from tests.hostile.lab import Lab


@pytest.fixture(scope="session")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    return laboratory.build(tmp_path_factory.mktemp("lab"))

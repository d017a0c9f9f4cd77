import pytest

from lightning_blocktrain.data import ByteDataModule


@pytest.fixture(scope="session")
def embedded(tmp_path_factory):
    """The embedded corpus, prepared once: reading the whole standard library takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("BLOCKTRAIN_CACHE", str(tmp_path_factory.mktemp("cache")))
        data = ByteDataModule()
    data.prepare_data()
    return data

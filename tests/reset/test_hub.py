"""Finding a model: folders, hub names, and what is said when neither will do."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from reset import hub
from reset.hub import model_folder

RESPONSE = SimpleNamespace(status_code=404, headers={}, request=None)


def test_a_folder_is_taken_as_it_is(tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "snapshot_download", None)
    assert model_folder(str(tmp_path)) == tmp_path


def test_a_hub_model_is_fetched_without_other_weight_formats(tmp_path, monkeypatch):
    def download(name, *, allow_patterns, ignore_patterns):
        assert name == "owner/name"
        assert "*.safetensors" in allow_patterns
        assert not {"*", "*.bin", "*.pth"} & set(allow_patterns)
        assert "original/*" in ignore_patterns
        return str(tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", download)
    assert model_folder("owner/name") == tmp_path


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (LocalEntryNotFoundError("offline"), OSError, "no such folder, and the hub cannot be"),
        (OfflineModeIsEnabled("offline"), OSError, "no such folder, and the hub cannot be"),
        (RepositoryNotFoundError("404", response=RESPONSE), ValueError, "no such model on the hub"),
        (GatedRepoError("403", response=RESPONSE), ValueError, "needs a login"),
        (HfHubHTTPError("502", response=RESPONSE), OSError, "the hub answered with an error"),
    ],
)
def test_what_goes_wrong_with_the_hub_is_explained(monkeypatch, error, kind, message):
    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr(hub, "snapshot_download", fail)
    with pytest.raises(kind, match=f"model owner/name: .*{message}"):
        model_folder("owner/name")


def test_a_name_that_is_nothing_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no such folder, and no name that a hub model can have"):
        model_folder(str(tmp_path / "a" / "b"))
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="is a file, need the folder"):
        model_folder(str(tmp_path / "file"))

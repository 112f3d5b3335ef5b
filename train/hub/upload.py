"""A folder that is ready to be published goes to the Hugging Face Hub, as a version with its tag."""

from dataclasses import dataclass, field
from pathlib import Path

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from decode.common.errors import UserError
from decode.drafts.base import METADATA_FILE
from train.hub import redaction

MARKER_FILES = {"model": METADATA_FILE, "dataset": "manifest.json"}
"""What a repository of ours holds; another one is not written into."""


@dataclass
class HubLabels:
    """What the Hub wants to know and no file says; empty: unknown."""

    base_model: str = ""
    """The target, by its name there."""
    license: str = ""
    dataset: str = ""


@dataclass
class TrainingPublishConfig:
    """Where a draft goes when its training ends."""

    repo: str = ""
    """Repository on the Hub, as me/my-draft; empty: the draft is not published."""
    private: bool = False
    """Only you and your organisation see it."""
    labels: HubLabels = field(default_factory=HubLabels)


@dataclass(frozen=True)
class PublishFolder:
    """What is ready to be published."""

    path: Path
    kind: str
    """model or dataset."""
    left_out: list[str]
    """Names in the draft's folder that stay at home."""


def check_repo_id(repo: str) -> None:
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise UserError(
            f"repository {repo!r} is no possible name on the Hub: use one like me/my-draft"
        ) from error
    if repo == "":
        raise UserError("give --repo, the name on the Hub, as me/my-draft")


def is_repo_id(name: str) -> bool:
    """Whether it could be a repository with its owner."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return name.count("/") == 1


def check_upload_possible(repo: str) -> None:
    """UserError if `repo` is no possible name or there is no token: before hours of training, and before sending."""
    check_repo_id(repo)
    if not get_token():
        raise UserError("no token for the Hub: run `hf auth login` or set HF_TOKEN")


def push(folder: PublishFolder, repo: str, private: bool) -> dict[str, str]:
    """Puts the folder into `repo`, made if need be, and tags it; {"commit", "tag", "url"}.

    Sent is what the Hub does not have yet: after a broken upload the same call goes on. Files of an earlier version
    stay unless they are replaced, but for serving/ and images/. UserError when the Hub or the network refuse, and for
    a repository of somebody else's things or one that is not private where it should be.
    """
    check_upload_possible(repo)
    api = HfApi()
    try:
        url = api.create_repo(repo, repo_type=folder.kind, private=private or None, exist_ok=True)
        repo = url.repo_id
        if private and not api.repo_info(repo, repo_type=folder.kind).private:
            raise UserError(
                f"{repo} is public already: make it private on its page, or publish without --private"
            )
        _check_ownership(api, folder, repo)
        commit = api.upload_folder(
            repo_id=repo,
            repo_type=folder.kind,
            folder_path=folder.path,
            commit_message="Publish with draftsmith",
            delete_patterns=["serving/*", "images/*"],
        )
        tag = _tag(api, folder.kind, repo, commit.oid)
    except UserError:
        raise
    except Exception as error:  # of many classes: HTTP, network, names, a server's strange answers
        cause = error.__cause__ or error
        reason = " ".join(str(cause).split()) or type(cause).__name__
        raise UserError(
            f"{repo} could not be written ({redaction.redact(reason):.300}): the same command goes on where it stopped"
        ) from error
    return {"commit": commit.oid, "tag": tag, "url": str(url)}


def _check_ownership(api: HfApi, folder: PublishFolder, repo: str) -> None:
    """UserError for a repository that holds files, none of which is a mark of ours."""
    there = set(api.list_repo_files(repo, repo_type=folder.kind)) - {".gitattributes", "README.md"}
    ours = {str(path.relative_to(folder.path)) for path in folder.path.rglob("*")}
    if MARKER_FILES[folder.kind] not in there and len(there - ours) > 0:
        raise UserError(
            f"{repo} holds {min(there - ours)} and nothing of draftsmith's: choose another name"
        )


def _tag(api: HfApi, kind: str, repo: str, commit: str) -> str:
    """The version tag of this commit: the one that it has, else the next of v1, v2, …"""
    tags = {ref.name: ref.target_commit for ref in api.list_repo_refs(repo, repo_type=kind).tags}
    for name, target in tags.items():
        if target == commit:
            return name
    number = next(n for n in range(1, len(tags) + 2) if f"v{n}" not in tags)
    api.create_tag(repo, repo_type=kind, tag=f"v{number}", revision=commit)
    return f"v{number}"

"""Uploads a folder to the Hugging Face Hub as a new version with its tag."""

from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from decode.checkpoints.draft_folder import METADATA_FILE
from decode.common.errors import UserError
from decode.common.proxies import through
from decode.common.published import check_text
from decode.common.secret_patterns import redact

MARKER_FILES = {"model": METADATA_FILE, "dataset": "manifest.json"}
"""The file that marks a repository of ours; repositories without it are not written to."""


@dataclass(frozen=True)
class PublishFolder:
    """A checked folder that can be uploaded."""

    path: Path
    kind: str  # model or dataset
    left_out: list[str]  # names of files that are not published


def check_repo_id(repo: str) -> None:
    """UserError if `repo` is empty, no valid name on the Hub, or holds a secret."""
    check_text(repo, "--repo")
    if repo == "":
        raise UserError("give --repo, the name on the Hub, as me/my-draft")
    if not is_repo_id(repo) and not is_repo_id(f"me/{repo}"):
        raise UserError(
            f"repository {repo!r} is not a valid name on the Hub: use one like me/my-draft"
        )


def is_repo_id(name: str) -> bool:
    """Whether `name` could be a repository with its owner, as me/my-draft."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return name.count("/") == 1


def check_upload_possible(repo: str) -> None:
    """UserError if `repo` is not a valid name or there is no token. Called before training, and before an upload."""
    check_repo_id(repo)
    if not get_token():
        raise UserError("no token for the Hub: run `hf auth login` or set HF_TOKEN")


def push(folder: PublishFolder, repo: str, private: bool) -> dict[str, str]:
    """Uploads the folder to `repo`, which is created if it does not exist, and tags it; {"commit", "tag", "url"}.

    Only files that the Hub does not have yet are sent: after a broken upload the same call continues. Files of an
    earlier version stay unless they are replaced, except serving/ and images/, which are deleted. UserError for errors
    of the Hub or the network, for a repository that is not ours, and for a public one where `private` is set.
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
    except Exception as error:  # of many classes: HTTP, network, names, invalid answers
        cause = error.__cause__ or error
        reason = " ".join(str(cause).split()) or type(cause).__name__
        raise UserError(
            f"{repo} could not be written ({redact(reason):.300}{through(api.endpoint)}): "
            "the same command continues where it stopped"
        ) from error
    return {"commit": commit.oid, "tag": tag, "url": str(url)}


def _check_ownership(api: HfApi, folder: PublishFolder, repo: str) -> None:
    """UserError for a repository with files and without our marker file."""
    there = set(api.list_repo_files(repo, repo_type=folder.kind)) - {".gitattributes", "README.md"}
    ours = {str(path.relative_to(folder.path)) for path in folder.path.rglob("*")}
    if MARKER_FILES[folder.kind] not in there and len(there - ours) > 0:
        raise UserError(
            f"{repo} contains {min(there - ours)} and no file of draftsmith: choose another name"
        )


def _tag(api: HfApi, kind: str, repo: str, commit: str) -> str:
    """The version tag of this commit: its existing one, else the next of v1, v2, …, which is created."""
    tags = {ref.name: ref.target_commit for ref in api.list_repo_refs(repo, repo_type=kind).tags}
    for name, target in tags.items():
        if target == commit:
            return name
    number = next(n for n in range(1, len(tags) + 2) if f"v{n}" not in tags)
    api.create_tag(repo, repo_type=kind, tag=f"v{number}", revision=commit)
    return f"v{number}"

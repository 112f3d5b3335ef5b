"""Uploads a folder to the Hugging Face Hub as a new version with its tag."""

import glob
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

from decode.checkpoints.draft_folder import METADATA_FILE, MODEL_FILES
from decode.common.errors import UserError
from decode.common.files import RUN_FILE
from decode.common.proxies import through
from decode.common.published import check_text
from decode.common.run_dir import owns
from decode.common.secret_patterns import redact
from train.settings.training import HubLabels

MARKER_FILES = {"model": METADATA_FILE, "dataset": "manifest.json"}
"""The file that marks a repository of ours; repositories without it are not written to."""


OWNED_FILES = (
    *MODEL_FILES,
    *(f"target/{name}" for name in MODEL_FILES),
    *(METADATA_FILE, RUN_FILE, "README.md"),
    *("report.json", "referee.json", "tuned.json", "data_curve.json", "speculation_profile.json"),
    "forecast.json",
    *("serving/**", "images/*.svg", "shards/*.parquet", "manifest.json"),
    *(".cache/**", ".gitattributes"),  # written by an upload
)
"""Patterns of the files of a published folder: one with others is not replaced, and in a repository those of an
earlier version are deleted."""


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
    if not is_hub_name(repo):
        raise UserError(
            f"repository {repo!r} is not a valid name on the Hub: use one like me/my-draft"
        )


def check_labels(labels: HubLabels) -> None:
    """UserError for a label that holds a secret, and for a model or data set that the Hub could not have."""
    for name, given in vars(labels).items():
        check_text(given, f"labels.{name}")
        if name != "license" and given and not is_hub_name(given):
            raise UserError(f"labels.{name} {given!r} is no name on the Hub: give OWNER/NAME")


def is_hub_name(name: str) -> bool:
    """Whether `name` could be a repository, as me/my-draft or, without an owner, gpt2."""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return True


def resolve_repo(repo: str, push: bool) -> str:
    """`repo` as OWNER/NAME; a name alone belongs to who is logged in.

    UserError for a name that is not valid, without a token where one is needed (to `push`, or for the owner), and if
    the Hub does not say whose it is. Called before training, and before a folder is made.
    """
    check_repo_id(repo)
    if (push or "/" not in repo) and not get_token():
        owner = "" if "/" in repo else f", or give --repo OWNER/{repo} to write the folder alone"
        raise UserError(f"no token for the Hub: run `hf auth login` or set HF_TOKEN{owner}")
    if "/" in repo:
        return repo
    try:
        return f"{HfApi().whoami()['name']}/{repo}"
    except Exception as error:  # of many classes: HTTP, network, invalid answers
        raise UserError(
            f"the Hub does not say who is logged in ({_reason(error):.300}): give --repo OWNER/{repo}"
        ) from error


def push(folder: PublishFolder, repo: str, private: bool) -> dict[str, str]:
    """Uploads the folder to `repo`, which is created if it does not exist, and tags it; {"commit", "tag", "url"}.

    Only files that the Hub does not have yet are sent: after a broken upload the same call continues. Then the
    repository has of all OWNED_FILES those of the folder; files of other names stay. UserError for errors of the Hub or
    the network, for a repository that is not ours, and for a public one where `private` is set.
    """
    repo = resolve_repo(repo, push=True)
    api = HfApi()
    try:
        url = api.create_repo(repo, repo_type=folder.kind, private=private or None, exist_ok=True)
        repo = url.repo_id
        if private and not api.repo_info(repo, repo_type=folder.kind).private:
            raise UserError(
                f"{repo} is public already: make it private on its page, or publish without --private"
            )
        old = _earlier_files(api, folder, repo)
        commit = api.upload_folder(
            repo_id=repo,
            repo_type=folder.kind,
            folder_path=folder.path,
            commit_message="Publish with draftsmith",
            delete_patterns=[glob.escape(name) for name in old],
        )
        tag = _tag(api, folder.kind, repo, commit.oid)
    except UserError:
        raise
    except Exception as error:  # of many classes: HTTP, network, names, invalid answers
        raise UserError(
            f"{repo} could not be written ({_reason(error):.300}{through(api.endpoint)}): "
            "the same command continues where it stopped"
        ) from error
    return {"commit": commit.oid, "tag": tag, "url": str(url)}


def _reason(error: Exception) -> str:
    """What an error of the Hub says, in one line without secrets."""
    cause = error.__cause__ or error
    return redact(" ".join(str(cause).split()) or type(cause).__name__)


def _earlier_files(api: HfApi, folder: PublishFolder, repo: str) -> list[str]:
    """What the repository has of OWNED_FILES and the folder has not. UserError for a repository with files and without
    our marker file."""
    there = set(api.list_repo_files(repo, repo_type=folder.kind)) - {".gitattributes"}
    foreign = there - {str(path.relative_to(folder.path)) for path in folder.path.rglob("*")}
    if MARKER_FILES[folder.kind] not in there and foreign - {"README.md"}:
        raise UserError(
            f"{repo} contains {min(foreign - {'README.md'})} and no file of draftsmith: choose another name"
        )
    return [x for x in sorted(foreign) if any(owns(pattern, Path(x)) for pattern in OWNED_FILES)]


def _tag(api: HfApi, kind: str, repo: str, commit: str) -> str:
    """The version tag of this commit: its existing one, else the next of v1, v2, …, which is created."""
    tags = {ref.name: ref.target_commit for ref in api.list_repo_refs(repo, repo_type=kind).tags}
    for name, target in tags.items():
        if target == commit:
            return name
    number = next(n for n in range(1, len(tags) + 2) if f"v{n}" not in tags)
    api.create_tag(repo, repo_type=kind, tag=f"v{number}", revision=commit)
    return f"v{number}"

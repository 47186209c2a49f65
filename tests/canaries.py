"""Thirty secrets as people have them in their environment, each of which no file or output of ours may hold."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

_NAMES = """WANDB_API_KEY HF_TOKEN HUGGING_FACE_HUB_TOKEN GITHUB_TOKEN GITLAB_PRIVATE_TOKEN OPENAI_API_KEY COMET_API_KEY
NEPTUNE_API_TOKEN MLFLOW_TRACKING_PASSWORD AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY AWS_SESSION_TOKEN AZURE_CLIENT_SECRET
GOOGLE_APPLICATION_CREDENTIALS_JSON KAGGLE_KEY DATABASE_URL DB_PASSWORD PGPASSWORD MYSQL_PWD REDIS_AUTH SSH_PASSPHRASE
NPM_AUTH_TOKEN JWT SESSION_COOKIE SBATCH_MY_TOKEN SBATCH_EXPORT HTTP_PROXY_CREDENTIALS""".split()


def _pem(kind: str, name: str) -> str:
    body = "\n".join(f"{name}-s3cret-line-{number}" for number in range(4))
    return f"-----BEGIN {kind} PRIVATE KEY-----\n{body}\n-----END {kind} PRIVATE KEY-----\n"


SECRETS: Mapping[str, str] = {
    **{name: f"s3cret-{number:02}-{name.lower()}" for number, name in enumerate(_NAMES)},
    "SBATCH_EXPORT": "ALL,WANDB_API_KEY=s3cret-in-a-list",
    "DATABASE_URL": "postgres://me:s3cret-in-a-url@db.example.org/x",
    "MYSQL_PWD": "s3cret $(touch CANARY) 'with' \"signs\"; # and blanks",
    "SSH_PRIVATE_KEY": _pem("OPENSSH", "ssh"),
    "DEPLOY_KEY": _pem("RSA", "deploy"),
    "SERVICE_ACCOUNT": '{\n  "type": "x",\n  "private_key": "s3cret-json\\n"\n}',
}
MARK = b"s3cret"
"""A part of each secret, and of each line of a key's body."""


def holders(*folders: Path) -> list[str]:
    """The files below these folders that hold a part of a secret, in their names or in their bytes."""
    found = []
    for folder in folders:
        for path in folder.rglob("*"):
            if MARK.decode() in path.name or (path.is_file() and MARK in path.read_bytes()):
                found.append(str(path))
    return found

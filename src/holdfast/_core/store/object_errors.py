"""The errors of object stores as sentences. The texts of the library are not passed on: they hold URLs, and
with them tokens."""

from __future__ import annotations

import errno
import os
import re

from holdfast._core.store.base import NotFound
from holdfast.errors import StorageError

EXTRA = "pip install 'torch-holdfast[object]'"
_CODE = re.compile(r"<Code>([A-Za-z]{3,60})</Code>|\(code: ([A-Za-z]{3,60})\)")
"""In a reply of the server; of a deletion, which is a request for several objects, in the library's words."""
_STATUS = re.compile(r"status code: ([0-9]{3})")
_MAY = {
    "Opening": "read objects (s3:GetObject; storage.objects.get; Blob Data Reader)",
    "Reading": "read objects (s3:GetObject; storage.objects.get; Blob Data Reader)",
    "Looking at": "read and list objects (s3:GetObject and s3:ListBucket; storage.objects.get and .list)",
    "Listing": "list the bucket (s3:ListBucket; storage.objects.list)",
    "Deleting": "delete objects (s3:DeleteObject; storage.objects.delete)",
}
_WRITE = "write objects (s3:PutObject; storage.objects.create; Blob Data Contributor)"
_NO_BUCKET = {"NoSuchBucket", "ContainerNotFound", "ContainerBeingDeleted"}
_EXPIRED = {"ExpiredToken", "TokenRefreshRequired", "ExpiredTokenException", "RequestExpired"}
_REFUSED = {
    "InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "AuthenticationFailed", "InvalidSecurity",
    "InvalidAuthenticationInfo",
}  # fmt: skip
_REGION = {
    "PermanentRedirect", "TemporaryRedirect", "AuthorizationHeaderMalformed",
    "IllegalLocationConstraintException",
}  # fmt: skip
_BUSY = {"SlowDown", "TooManyRequests", "ServerBusy", "RequestLimitExceeded", "Throttling"}
_LATER = _BUSY | {"RequestTimeout", "ServiceUnavailable", "InternalError"}
"""Codes that ask for the same request again, whatever the status: a body that came too slowly is a 400, and a
reply about several objects a 200."""
_NOT_ALLOWED = {
    "", "AccessDenied", "Forbidden", "AuthorizationFailure", "AuthorizationPermissionMismatch",
    "InsufficientAccountPermissions",
}  # fmt: skip
"""Codes of a 403 that tell of rights; a reply to HEAD has none. Others tell of a clock, or of a key."""
_DO = {
    "RequestTimeout": "The bytes of a request came too slowly: is the network or the processor of this host "
    "overloaded? Options(retries=3) makes a save in the background again.",
    "RequestTimeTooSkewed": "Set the clock of this host.",
}
"""What to do, by the server's code."""
_KNOWS = {
    "Publishing": "Use a server that knows conditional writes (If-None-Match, If-Match).",
    "Deleting": "Use a server that knows deletions of several objects in one request.",
}
"""What a server does not know that answers so."""
_ROLE = re.compile(
    r"[a-z]+://[^/\s]+/(?:latest/(?:api/token|meta-data)|computeMetadata/|metadata/identity)", re.IGNORECASE
)
"""A request to the host's service of roles, which is asked only if no credentials are given."""
_GIVE = {
    "s3": "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (if temporary, AWS_SESSION_TOKEN, too), or "
    "give this host or pod a role. Profiles of ~/.aws are not read.",
    "gs": "Set GOOGLE_APPLICATION_CREDENTIALS to the path of a key file, or give this host or pod a service "
    "account.",
    "az": "Set AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY, or give this host or pod a managed "
    "identity.",
}
"""How credentials are given, by scheme."""
_CAUSES = (
    ("Connection refused", "nothing listens at its address"),
    ("dns error", "its name is unknown to the DNS"),
    ("certificate", "its certificate is not trusted here"),
    ("TimedOut", "it gave no answer in time"),
    ("Timeout", "it gave no answer in time"),
    ("error sending request", "the connection broke off before an answer"),
    ("HTTP error", "the connection broke off before the end of the answer"),
)
"""What a text of the library says of the cause, the most telling first."""


def code_of(error: BaseException) -> str:
    """Return the server's code of an error, such as SlowDown; "" if there is none."""
    found = _CODE.search(str(error))
    return "" if found is None else found[1] or found[2]


def status_of(error: BaseException) -> int:
    """Return the status of HTTP in an error; 0 if there is none."""
    found = _STATUS.search(str(error))
    return 0 if found is None else int(found[1])


def is_answer(error: BaseException) -> bool:
    """Return whether an error is an answer of the server of objects."""
    answered = status_of(error) > 0 or code_of(error) or isinstance(error, FileNotFoundError)
    return bool(answered) and not _asks_for_role(error)


def is_busy(error: BaseException) -> bool:
    """Return whether the server has most likely not executed a request, and may do it later."""
    status = status_of(error)
    return status == 429 or (status >= 500 and status != 501) or code_of(error) in _LATER


def is_passing(error: BaseException) -> bool:
    """Return whether the same request may succeed later: the server is busy, or the connection broke off."""
    text = str(error)
    broke_off = not is_answer(error) and "HTTP error" in text and "certificate" not in text
    return broke_off or is_busy(error)


def is_final(error: BaseException) -> bool:
    """Return whether the server has refused a request, so that it was not executed, and will not be."""
    status = status_of(error)
    if code_of(error) in _LATER:
        return False
    refused = status == 501 or (300 <= status < 500 and status not in (408, 409, 412, 425, 429))
    if status == 404:
        refused = _asks_for_role(error)
    return refused or code_of(error) in _NO_BUCKET


def _asks_for_role(error: BaseException) -> bool:
    """Return whether the request that failed was to the host's service of roles."""
    return _ROLE.search(str(error)) is not None


def explained(doing: str, url: str, error: BaseException, seconds: float) -> StorageError:
    """Return the error to raise instead of one of the library."""
    code, status, text = code_of(error), status_of(error), str(error)
    kind, what = StorageError, f"{doing} {url} failed: "
    bucket, number = "/".join(url.split("/")[:3]), errno.EIO
    give = _GIVE.get(bucket.partition(":")[0], "")
    if _asks_for_role(error):
        number = errno.EACCES
        why, hint = (
            "there are no credentials in the environment, and this host has given none of a role",
            give,
        )
    elif "Account must be specified" in text:
        number = errno.EINVAL
        why, hint = "no storage account is named", give
    elif code in _NO_BUCKET:
        why, hint = f"there is no {bucket}", "Create the bucket; Holdfast makes none."
    elif code == "NoSuchUpload":
        why, hint = "its upload was given up, as another part was refused or took too long", ""
    elif isinstance(error, FileNotFoundError) or status == 404:
        kind, number = NotFound, errno.ENOENT
        why, hint = "there is no such object", ""
    elif code in _EXPIRED:
        why = "the token of these credentials has expired"
        hint = "Use credentials that renew themselves (a role), or set new ones in the environment."
    elif code in _REGION or status == 301 or "configured region" in text:
        why = f"{bucket} is in another region than the one that is asked"
        hint = "Set AWS_REGION to the region of the bucket."
    elif code in _REFUSED or status == 401:
        why, hint = "these credentials are refused", "Look at the credentials in the environment."
    elif code in _NOT_ALLOWED and (status == 403 or (code and not status)):
        number = errno.EACCES
        may = _MAY.get(doing, _WRITE)
        if bucket.startswith("s3:") and is_anonymous():
            why = f"there are no credentials (AWS_SKIP_SIGNATURE is set), and without any one may not {may}"
            hint = f"Unset AWS_SKIP_SIGNATURE. {give}"
        else:
            why = f"these credentials may not {may}"
            hint = "Give that right. S3 also says this of a missing object to who may not list the bucket."
    elif code in _BUSY or status == 429:
        why = f"it asks to be asked less often ({code or status}), and went on for {seconds:.0f} s"
        hint = "Save less often, from fewer ranks at once, or ask your provider for more requests."
    elif status == 501 or code == "NotImplemented":
        why = "this server does not know such requests"
        hint = _KNOWS.get(doing, "")
    elif status or code:
        said = f"status {status}" if status else "an error"
        said += f" ({code})" if code else ""
        went_on = f", and this went on for {seconds:.0f} s" if is_busy(error) else ""
        why, hint = f"it answered with {said}{went_on}", _DO.get(code, "")
    elif isinstance(error, TimeoutError):
        number = errno.ETIMEDOUT
        why = f"within {seconds:.0f} s there was no answer, or only refusals after which it was tried again"
        hint = "Is the address right, and reachable?"
    else:
        why = next((said for sign, said in _CAUSES if sign in text), type(error).__name__)
        hint = "Is the address right, and reachable, and are there credentials?"
    return kind(f"{what}{why}.", hint=hint, details={"errno": number, "status": status})


def is_anonymous() -> bool:
    """Return whether requests to S3 are not signed."""
    return os.environ.get("AWS_SKIP_SIGNATURE", "").lower() in ("1", "true", "on", "yes", "y")


def missing_package(error: ImportError) -> StorageError:
    return StorageError(
        f"s3://, gs:// and az:// places need the package obstore, which can't be imported here: {error}.",
        hint=EXTRA,
    )

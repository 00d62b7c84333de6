//! Error messages about a store that fails, without anything secret.

use std::error::Error as _;
use std::{fmt, io};

use object_store::Error;
use rustix::io::Errno;

/// The reason why a store failed, and its remedy.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trouble {
    /// The kind of trouble.
    pub kind: TroubleKind,
    /// The request that failed.
    pub asked: &'static str,
    /// The store's own code, its status, or the system's error. Never a body, a header or a URL.
    pub detail: String,
}

/// Kinds of trouble. As texts, these are their names in metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq, strum::IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum TroubleKind {
    /// The store does not know these credentials.
    Credentials,
    /// These credentials do not allow this request.
    Denied,
    /// The store's clock and this machine's differ.
    Clock,
    /// There is no such bucket.
    NoBucket,
    /// Nobody answers at the store's address.
    Unreachable,
    /// The store takes too long.
    TimedOut,
    /// The store cannot do this.
    Unsupported,
    /// Anything else.
    #[strum(serialize = "failed")]
    Other,
}

impl Trouble {
    pub(super) fn new(kind: TroubleKind, asked: &'static str, detail: impl Into<String>) -> Self {
        Self { kind, asked, detail: detail.into() }
    }

    /// Whether the store gave no answer.
    pub(super) fn is_silence(&self) -> bool {
        matches!(self.kind, TroubleKind::TimedOut | TroubleKind::Unreachable)
    }

    /// Whether the store, or the link to it, has more to do than it can.
    pub(super) fn is_overload(&self) -> bool {
        self.kind == TroubleKind::TimedOut || OVERLOAD.contains(&self.detail.as_str())
    }

    /// Whether another request for the same object was under way.
    pub(super) fn is_of_conflict(&self) -> bool {
        self.detail == CONFLICT
    }

    /// Whether the store keeps the object in an archive.
    pub(super) fn is_of_archive(&self) -> bool {
        ARCHIVED.contains(&self.detail.as_str())
    }

    pub(super) fn of(error: &Error, asked: &'static str) -> Self {
        let said = chain(error);
        let code = between(&said, "<Code>", "</Code>").or_else(|| status(&said));
        // Deletions are answered one by one, with the key before the code.
        let code = code.or_else(|| between(said.rsplit_once("(code: ")?.1, "", ")"));
        let kind = match error {
            _ if code.is_some_and(|code| BAD_CREDENTIALS.contains(&code)) => TroubleKind::Credentials,
            Error::Unauthenticated { .. } => TroubleKind::Credentials,
            _ if code == Some(WRONG_CLOCK) => TroubleKind::Clock,
            Error::PermissionDenied { .. } => TroubleKind::Denied,
            _ if code.is_some_and(|code| DENIED.contains(&code)) => TroubleKind::Denied,
            Error::NotFound { .. } => TroubleKind::NoBucket,
            Error::NotImplemented { .. } | Error::NotSupported { .. } => TroubleKind::Unsupported,
            _ if code.is_some_and(|code| ["NotImplemented", "501"].contains(&code)) => {
                TroubleKind::Unsupported
            }
            _ if code.is_some() => TroubleKind::Other,
            _ => http_kind(error),
        };
        let detail = code.map_or_else(|| innermost(error), str::to_owned);
        Self { kind, asked, detail }
    }
}

impl fmt::Display for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, asked, detail } = self;
        let (what, asked, advice) = match kind {
            TroubleKind::Credentials => (
                "it does not accept the credentials",
                "",
                ": correct them, in the settings or the environment",
            ),
            TroubleKind::Denied => (
                "these credentials may not ",
                *asked,
                ": allow them to read, write, delete and list objects there (without the right to list, S3 calls absent \
                 objects forbidden)",
            ),
            TroubleKind::Clock => ("this machine's clock is wrong", "", ": correct it"),
            TroubleKind::NoBucket => {
                ("there is no such bucket or folder", "", ": make it, or correct the URL")
            }
            TroubleKind::Unreachable => {
                ("it cannot be reached", "", ": check endpoint, name resolution and network")
            }
            TroubleKind::TimedOut => {
                ("it took too long to ", *asked, ": check endpoint and network, or raise the timeout")
            }
            TroubleKind::Unsupported => ("it cannot ", *asked, ""),
            TroubleKind::Other => ("it fails to ", *asked, ": see the store's own log"),
        };
        write!(f, "{what}{asked} ({detail}){advice}")
    }
}

/// Whether a store says that there is no such bucket. Answers to HEAD do not say it.
pub(super) fn is_of_no_bucket(error: &Error) -> bool {
    between(&chain(error), "<Code>", "</Code>").is_some_and(|code| NO_BUCKET.contains(&code))
}

/// Whether a store wrote nothing because it has an object of this name. The `object_store` crate reports every status 409 as
/// [`Error::AlreadyExists`]: conflicts with other requests, and buckets that are being deleted, too.
pub(super) fn is_refused_overwrite(error: &Error) -> bool {
    if !matches!(error, Error::AlreadyExists { .. } | Error::Precondition { .. }) {
        return false;
    }
    let said = chain(error);
    let is_conflict = status(&said).is_none_or(|status| status == "409");
    let is_of_object = |code: &str| code.ends_with(EXISTS) || code == UNMET || ARCHIVED.contains(&code);
    !is_conflict || between(&said, "<Code>", "</Code>").is_none_or(is_of_object)
}

/// Turns the error of a file system without hard links, by which a local folder creates objects, into [`Error::NotSupported`].
pub(super) fn unsupported_if_no_links(error: Error) -> Error {
    let mut source = error.source();
    while let Some(cause) = source {
        let system = cause.downcast_ref::<io::Error>().and_then(io::Error::raw_os_error);
        if system.is_some_and(|system| NO_LINKS.contains(&Errno::from_raw_os_error(system))) {
            return Error::NotSupported { source: error.into() };
        }
        source = cause.source();
    }
    error
}

/// The kind of an error of the HTTP client itself: how far the request came.
fn http_kind(error: &Error) -> TroubleKind {
    use object_store::client::{HttpError, HttpErrorKind};
    let mut source = error.source();
    while let Some(error) = source {
        if let Some(error) = error.downcast_ref::<HttpError>() {
            return match error.kind() {
                HttpErrorKind::Connect => TroubleKind::Unreachable,
                HttpErrorKind::Timeout => TroubleKind::TimedOut,
                _ => TroubleKind::Other,
            };
        }
        source = error.source();
    }
    TroubleKind::Other
}

fn chain(error: &Error) -> String {
    let mut said = error.to_string();
    let mut source = error.source();
    while let Some(error) = source {
        said.push_str(" : ");
        said.push_str(&error.to_string());
        source = error.source();
    }
    said
}

/// The message of the last cause: the system's words, since earlier causes quote the store's answer.
fn innermost(error: &Error) -> String {
    let mut last: &(dyn std::error::Error + 'static) = error;
    while let Some(source) = last.source() {
        last = source;
    }
    last.to_string().chars().take(MOST_CHARACTERS).collect()
}

fn status(said: &str) -> Option<&str> {
    let (_, after) = said.split_once("status code: ")?;
    after.get(..3).filter(|status| status.bytes().all(|byte| byte.is_ascii_digit()))
}

fn between<'a>(said: &'a str, before: &str, after: &str) -> Option<&'a str> {
    let (code, _) = said.split_once(before)?.1.split_once(after)?;
    (code.len() <= MOST_CHARACTERS && code.bytes().all(|byte| byte.is_ascii_alphanumeric())).then_some(code)
}

/// S3's codes for unknown credentials, with the status of a refusal.
const BAD_CREDENTIALS: [&str; 5] =
    ["InvalidAccessKeyId", "SignatureDoesNotMatch", "InvalidToken", "ExpiredToken", "InvalidClientTokenId"];

/// S3's code for a request beside another request for the same object.
const CONFLICT: &str = "ConditionalRequestConflict";

/// S3's code for a request whose time differs too much from the store's.
const WRONG_CLOCK: &str = "RequestTimeTooSkewed";

/// The codes of single refused deletions.
const DENIED: [&str; 2] = ["AccessDenied", "403"];

/// Codes and statuses of stores that want fewer requests, or got a body too slowly.
const OVERLOAD: [&str; 8] = [
    "SlowDown",
    "ServiceUnavailable",
    "ServerBusy",
    "TooManyRequests",
    "Throttling",
    "RequestTimeout",
    "429",
    "503",
];

/// Codes for a missing bucket.
const NO_BUCKET: [&str; 2] = ["NoSuchBucket", "ContainerNotFound"];

/// Codes of Azure for objects that are in an archive, or on their way out of it.
const ARCHIVED: [&str; 2] = ["BlobArchived", "BlobBeingRehydrated"];

/// The end of codes for existing objects, such as `BlobAlreadyExists`, and the code for an unmet condition.
const EXISTS: &str = "AlreadyExists";
const UNMET: &str = "PreconditionFailed";

/// Errors of file systems without hard links.
const NO_LINKS: [Errno; 4] = [Errno::PERM, Errno::OPNOTSUPP, Errno::NOSYS, Errno::MLINK];

/// Limit of the system's message and of a code.
const MOST_CHARACTERS: usize = 120;

#[cfg(test)]
mod tests {
    use super::*;

    fn generic(said: &str) -> Trouble {
        Trouble::of(&Error::Generic { store: "S3", source: said.into() }, "delete an object")
    }

    #[test]
    fn a_refused_deletion_has_a_reason_and_no_key() {
        let key = format!("larder/v1/{0}/ab/{0}-0-0", "ab".repeat(32));
        let s3 = format!("DeleteObjects request failed for key {key}: Access Denied (code: AccessDenied)");
        let azure = format!("Bulk delete request failed for key {key}: Forbidden (code: 403)");
        for (said, code) in [(s3, "AccessDenied"), (azure, "403")] {
            let trouble = generic(&said);
            assert_eq!((trouble.kind, &*trouble.detail), (TroubleKind::Denied, code));
        }
        let other = generic("DeleteObjects request failed for key a: (code: 1): Slow down (code: SlowDown)");
        assert_eq!((other.kind, &*other.detail), (TroubleKind::Other, "SlowDown"));
    }

    #[test]
    fn a_wrong_clock_is_told_apart_from_missing_rights() {
        let source = "status code: 403 Forbidden: <Code>RequestTimeTooSkewed</Code>".into();
        let error = Error::PermissionDenied { path: "p".to_owned(), source };
        let said = Trouble::of(&error, "read an object").to_string();
        assert_eq!(said, "this machine's clock is wrong (RequestTimeTooSkewed): correct it");
    }
}

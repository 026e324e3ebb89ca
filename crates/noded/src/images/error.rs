//! What can go wrong with images, each with the step, the file and the kernel's reason, and what to do about it.

use std::{
    io,
    path::{Path, PathBuf},
};

use sandmill_wire::ApiError;

use super::registry::Refusal;

pub type Result<T> = std::result::Result<T, Error>;

/// An error of the image store.
#[derive(Debug)]
pub enum Error {
    /// A step on the store's own files failed.
    Io {
        step: &'static str,
        path: PathBuf,
        source: io::Error,
    },
    /// The store itself is damaged: one of its files does not parse.
    Damaged {
        path: PathBuf,
        reason: String,
    },
    /// A file to import is missing or cannot be read.
    Unreadable {
        path: PathBuf,
        source: io::Error,
    },
    /// A file to import is not what it should be.
    Malformed {
        file: String,
        expected: String,
        found: String,
    },
    /// Content does not match the digest that names it.
    DigestMismatch {
        file: String,
        expected: String,
        found: String,
    },
    /// An archive is larger than the limits allow.
    TooLarge {
        file: String,
        what: String,
    },
    /// A registry did not give what was asked for.
    Registry(Refusal),
    NotFound {
        name: String,
    },
    InUse {
        name: String,
        holders: usize,
    },
    InvalidName {
        name: String,
        reason: &'static str,
    },
    InvalidArgument {
        reason: String,
    },
    /// This machine cannot serve as the `host` image.
    HostUnsupported {
        reason: String,
    },
    /// A tree cannot become a layer.
    Uncommittable {
        path: PathBuf,
        reason: String,
    },
}

impl Error {
    /// For `map_err`: an I/O error of the store with its step and path.
    pub fn io(step: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { step, path, source }
    }

    /// For `map_err` on rustix' calls.
    pub fn os(step: &'static str, path: impl AsRef<Path>) -> impl FnOnce(rustix::io::Errno) -> Self {
        let path = path.as_ref().to_owned();
        move |errno| Self::Io { step, path, source: errno.into() }
    }

    pub fn malformed(file: impl Into<String>, expected: impl Into<String>, found: impl Into<String>) -> Self {
        Self::Malformed { file: file.into(), expected: expected.into(), found: found.into() }
    }
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Io { step, path, source } => write!(f, "cannot {step} {}: {source}", path.display()),
            Self::Damaged { path, reason } => write!(f, "{} of the image store is damaged: {reason}", path.display()),
            Self::Unreadable { path, source } => write!(f, "cannot read {}: {source}", path.display()),
            Self::Malformed { file, expected, found } => write!(f, "{file}: expected {expected}, found {found}"),
            Self::DigestMismatch { file, expected, found } => {
                write!(f, "{file}: its digest is {found}, but {expected} was promised")
            }
            Self::TooLarge { file, what } => write!(f, "{file}: {what}"),
            Self::Registry(refusal) => refusal.fmt(f),
            Self::NotFound { name } => write!(f, "there is no image {name:?}"),
            Self::InUse { name, holders } => write!(f, "image {name:?} is in use by {holders} sandbox(es)"),
            Self::InvalidName { name, reason } => write!(f, "{name:?} cannot name an image: {reason}"),
            Self::InvalidArgument { reason } => f.write_str(reason),
            Self::HostUnsupported { reason } => write!(f, "this machine cannot serve as the image \"host\": {reason}"),
            Self::Uncommittable { path, reason } => write!(f, "cannot commit {}: {reason}", path.display()),
        }
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Io { source, .. } | Self::Unreadable { source, .. } => Some(source),
            _ => None,
        }
    }
}

impl From<Refusal> for Error {
    fn from(refusal: Refusal) -> Self {
        Self::Registry(refusal)
    }
}

impl From<Error> for ApiError {
    fn from(error: Error) -> Self {
        let message = error.to_string();
        match error {
            Error::Io { source, .. } if is_no_space(&source) => Self::new(507, "no_space", message)
                .hint("free space on the state directory's file system: `sandmill image rm NAME` removes images")
                .retryable(),
            Error::Io { .. } => Self::new(500, "image_store_failed", message),
            Error::Damaged { .. } => Self::new(500, "image_store_damaged", message)
                .hint("move the file away and import the image again; other images are not affected"),
            Error::Unreadable { .. } => Self::new(400, "image_source_unreadable", message)
                .hint("the path is opened by noded, as root, on the machine where it runs"),
            Error::Malformed { .. } => Self::new(400, "image_malformed", message),
            Error::DigestMismatch { .. } => Self::new(400, "image_digest_mismatch", message)
                .hint("the file is damaged or was changed: export or copy it again"),
            Error::TooLarge { .. } => Self::new(413, "image_too_large", message),
            Error::Registry(refusal) => refusal.into(),
            Error::NotFound { .. } => Self::new(404, "image_not_found", message)
                .hint("`sandmill image ls` lists what is there; `sandmill image pull NAME` and `sandmill image import PATH --name NAME` add one"),
            Error::InUse { .. } => Self::new(409, "image_in_use", message)
                .hint("end the sandboxes that run on it first; `sandmill ls` shows them")
                .retryable(),
            Error::InvalidName { .. } => Self::new(400, "invalid_image_name", message),
            Error::InvalidArgument { .. } => Self::new(400, "invalid_argument", message),
            Error::HostUnsupported { .. } => Self::new(409, "host_image_unsupported", message)
                .hint("import an image instead: `sandmill image import PATH --name NAME`"),
            Error::Uncommittable { .. } => Self::new(422, "commit_failed", message),
        }
    }
}

fn is_no_space(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(code) if code == libc::ENOSPC || code == libc::EDQUOT)
}

//! What a registry can answer instead of an image.

use std::{fmt, time::Duration};

use sandmill_wire::ApiError;

/// Why an image could not be fetched.
#[derive(Debug, Clone)]
pub struct Refusal {
    pub kind: Kind,
    /// What was asked for, and what came back.
    pub message: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The registry has no such image, or hides it.
    NotFound,
    /// The credentials are missing or not good enough.
    Auth,
    /// 429; how long the registry wants to be left alone, if it said so.
    RateLimited(Option<Duration>),
    /// No connection, after all tries.
    Unreachable,
    /// A connection that was cut, or an error of the server's own, after all tries.
    Unavailable,
    /// What came back is not what the protocol says.
    Protocol,
    /// Nobody waits for the image any more.
    Cancelled,
}

impl Refusal {
    pub fn new(kind: Kind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into() }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Refusal {}

impl From<Refusal> for ApiError {
    fn from(refusal: Refusal) -> Self {
        let message = refusal.message;
        match refusal.kind {
            Kind::NotFound => Self::new(404, "image_not_found", message).hint(
                "check name and tag; a private image looks like a missing one without credentials (`docker login`)",
            ),
            Kind::Auth => Self::new(403, "image_auth", message).hint(
                "log in with `docker login` or `podman login` as the user that runs sandmill serve, or give --username",
            ),
            Kind::RateLimited(wait) => {
                let error = Self::new(429, "image_rate_limited", message).retryable();
                match wait {
                    Some(wait) => error.hint(format!(
                        "the registry asks to wait {} s; a mirror in registries.conf helps",
                        wait.as_secs()
                    )),
                    None => error.hint("log in, or set up a mirror in registries.conf"),
                }
            }
            Kind::Unreachable | Kind::Unavailable => Self::new(502, "registry_unavailable", message)
                .hint("check the host name, the network of this machine and its proxy settings (HTTPS_PROXY)")
                .retryable(),
            Kind::Protocol => Self::new(502, "registry_protocol", message)
                .hint("is this a registry? its address is looked for under /v2/"),
            Kind::Cancelled => Self::new(499, "cancelled", message),
        }
    }
}

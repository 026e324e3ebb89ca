//! The one error shape of the wire.

use serde::{Deserialize, Serialize};

/// An error as every process of Sandmill says it: a stable code, what happened, what to do, and whether trying the same
/// again can help.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ApiError {
    /// HTTP status; not part of the body.
    #[serde(skip)]
    pub status: u16,
    pub code: String,
    pub message: String,
    pub hint: Option<String>,
    pub retryable: bool,
    #[serde(default)]
    pub details: serde_json::Value,
}

impl ApiError {
    pub fn new(status: u16, code: &str, message: impl Into<String>) -> Self {
        Self {
            status,
            code: code.to_owned(),
            message: message.into(),
            hint: None,
            retryable: false,
            details: serde_json::Value::Null,
        }
    }

    /// What the caller can do about it.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// Says that the same call can work later.
    #[must_use]
    pub fn retryable(mut self) -> Self {
        self.retryable = true;
        self
    }

    #[must_use]
    pub fn details(mut self, details: serde_json::Value) -> Self {
        self.details = details;
        self
    }
}

impl std::fmt::Display for ApiError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.code, self.message)
    }
}

impl std::error::Error for ApiError {}

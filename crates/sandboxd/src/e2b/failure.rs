//! Connect's error codes, and ours in terms of them.

use http::StatusCode;
use sandmill_wire::ApiError;
use serde::Serialize;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Code {
    InvalidArgument,
    DeadlineExceeded,
    NotFound,
    AlreadyExists,
    PermissionDenied,
    ResourceExhausted,
    FailedPrecondition,
    Unimplemented,
    Internal,
    Unavailable,
    DataLoss,
    Unauthenticated,
}

impl Code {
    /// The status of a unary answer, by Connect's table.
    fn status(self) -> StatusCode {
        match self {
            Self::InvalidArgument | Self::FailedPrecondition => StatusCode::BAD_REQUEST,
            Self::Unauthenticated => StatusCode::UNAUTHORIZED,
            Self::PermissionDenied => StatusCode::FORBIDDEN,
            Self::NotFound => StatusCode::NOT_FOUND,
            Self::AlreadyExists => StatusCode::CONFLICT,
            Self::ResourceExhausted => StatusCode::TOO_MANY_REQUESTS,
            Self::Unimplemented => StatusCode::NOT_IMPLEMENTED,
            Self::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
            Self::DeadlineExceeded => StatusCode::GATEWAY_TIMEOUT,
            Self::Internal | Self::DataLoss => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }
}

/// An error of a Connect call.
#[derive(Debug, Clone, Serialize)]
pub struct Failure {
    pub code: Code,
    pub message: String,
    #[serde(skip)]
    pub status: StatusCode,
}

impl Failure {
    pub fn new(code: Code, message: impl Into<String>) -> Self {
        Self { code, message: message.into(), status: code.status() }
    }

    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(Code::InvalidArgument, message)
    }

    /// For what Connect answers with another status than that of the code.
    pub fn with_status(mut self, status: StatusCode) -> Self {
        self.status = status;
        self
    }
}

impl From<ApiError> for Failure {
    fn from(error: ApiError) -> Self {
        let code = match (error.code.as_str(), error.status) {
            ("user_not_found", _) => Code::Unauthenticated,
            ("no_space", _) => Code::ResourceExhausted,
            ("too_many_links" | "stdin_closed" | "no_terminal" | "process_ended", _) => Code::FailedPrecondition,
            (_, 400 | 413 | 416) => Code::InvalidArgument,
            (_, 403) => Code::PermissionDenied,
            (_, 404) => Code::NotFound,
            ("already_exists", _) => Code::AlreadyExists,
            (_, 408 | 504) => Code::DeadlineExceeded,
            (_, 409) => Code::FailedPrecondition,
            (_, 429) => Code::ResourceExhausted,
            (_, 501) => Code::Unimplemented,
            (_, 503) => Code::Unavailable,
            _ => Code::Internal,
        };
        let message = match &error.hint {
            Some(hint) => format!("{}; {hint}", error.message),
            None => error.message,
        };
        Self::new(code, message)
    }
}

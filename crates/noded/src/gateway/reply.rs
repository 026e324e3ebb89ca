//! Answers of the gateway's own, and the body of every answer.

use std::{
    pin::Pin,
    task::{Context, Poll},
};

use bytes::Bytes;
use http::{header, HeaderValue, Response, StatusCode};
use http_body::{Body, Frame, SizeHint};
use sandmill_wire::ApiError;
use serde_json::{json, Value};

use super::{client::Open, upstream::Passing};

pub type Reply = Response<ReplyBody>;

/// Bytes at hand, or what a sandbox answers as it comes.
pub enum ReplyBody {
    Full(Option<Bytes>),
    Passing(Passing),
}

impl Body for ReplyBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        match self.get_mut() {
            Self::Full(bytes) => Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
            Self::Passing(body) => body.poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Full(bytes) => bytes.is_none(),
            Self::Passing(body) => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Full(bytes) => SizeHint::with_exact(bytes.as_ref().map_or(0, |bytes| bytes.len() as u64)),
            Self::Passing(body) => body.size_hint(),
        }
    }
}

/// A body whose request counts as open until it is through.
pub struct Counted {
    body: ReplyBody,
    _open: Open,
}

impl Counted {
    pub fn new(body: ReplyBody, open: Open) -> Self {
        Self { body, _open: open }
    }
}

impl Body for Counted {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        Pin::new(&mut self.body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

pub fn empty(status: StatusCode) -> Reply {
    let mut reply = Reply::new(ReplyBody::Full(None));
    *reply.status_mut() = status;
    reply
}

/// An error in both shapes at once: E2B's numeric `code` and `message`, and ours with `error_code`, `hint`, `retryable`.
pub fn error(error: &ApiError, id: Option<&str>) -> Reply {
    let mut reply = Reply::new(ReplyBody::Full(Some(error_body(error, id).into())));
    *reply.status_mut() = StatusCode::from_u16(error.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    reply.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    reply
}

/// The same as a whole HTTP/1.1 response that ends its connection, for where no HTTP server is left to write it.
pub fn raw_error(error: &ApiError, id: Option<&str>) -> Vec<u8> {
    let body = error_body(error, id);
    let status = StatusCode::from_u16(error.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let reason = status.canonical_reason().unwrap_or("Error");
    format!(
        "HTTP/1.1 {} {reason}\r\ncontent-type: application/json\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}",
        status.as_u16(),
        body.len()
    )
    .into_bytes()
}

fn error_body(error: &ApiError, id: Option<&str>) -> String {
    let mut body = json!({
        "code": error.status,
        "message": error.message,
        "error_code": error.code,
        "hint": error.hint,
        "retryable": error.retryable,
        "details": error.details,
    });
    if let Some(id) = id {
        body["sandboxId"] = Value::from(id);
    }
    if let Some(port) = error.details.get("port") {
        body["port"] = port.clone();
    }
    body.to_string()
}

/// A sandbox that isn't there; `end` is its SandboxEnd if it was once.
pub fn gone(end: Option<Value>) -> ApiError {
    match end {
        None => ApiError::new(502, "sandbox_not_found", "The sandbox was not found")
            .hint("check the id; an ended sandbox is remembered for a while only"),
        Some(end) => ApiError::new(502, "sandbox_gone", "The sandbox was not found")
            .hint("it has ended: details.cause says why")
            .details(end),
    }
}

//! Bodies of requests and replies.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll},
};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt as _;
use sandmill_wire::ApiError;
use tokio::sync::mpsc;

use crate::activity::Running;

pub type Request = http::Request<hyper::body::Incoming>;
pub type Reply = http::Response<ReplyBody>;

/// The body of a reply: nothing, bytes at hand, or a stream of chunks.
pub struct ReplyBody {
    kind: Kind,
    /// The call counts as running until its body is through.
    _running: Option<Running>,
}

enum Kind {
    Full(Option<Bytes>),
    Channel(mpsc::Receiver<io::Result<Bytes>>),
}

impl ReplyBody {
    pub fn empty() -> Self {
        Self { kind: Kind::Full(None), _running: None }
    }

    pub fn full(bytes: impl Into<Bytes>) -> Self {
        Self { kind: Kind::Full(Some(bytes.into())), _running: None }
    }

    /// A body fed through a bounded channel of `capacity` chunks. `send` waits while the client is slow and fails when it
    /// is gone; an `Err` breaks the connection off, so that the client cannot take a cut body for a whole one.
    pub fn channel(capacity: usize) -> (mpsc::Sender<io::Result<Bytes>>, Self) {
        let (sender, receiver) = mpsc::channel(capacity);
        (sender, Self { kind: Kind::Channel(receiver), _running: None })
    }

    pub fn hold(&mut self, running: Running) {
        self._running = Some(running);
    }
}

impl Body for ReplyBody {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        match &mut self.kind {
            Kind::Full(bytes) => Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
            Kind::Channel(receiver) => receiver.poll_recv(cx).map(|chunk| chunk.map(|chunk| chunk.map(Frame::data))),
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.kind {
            Kind::Full(bytes) => bytes.is_none(),
            Kind::Channel(_) => false,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.kind {
            Kind::Full(bytes) => SizeHint::with_exact(bytes.as_ref().map_or(0, |bytes| bytes.len() as u64)),
            Kind::Channel(_) => SizeHint::default(),
        }
    }
}

/// Reads a whole request body of at most `limit` bytes.
///
/// Errors: 413 `body_too_large`; 400 `body_incomplete` when the client breaks off.
pub async fn collect(mut body: hyper::body::Incoming, limit: usize) -> Result<Bytes, ApiError> {
    let too_large = || {
        ApiError::new(413, "body_too_large", format!("the request's body is longer than {limit} bytes"))
            .hint("send large data through the files call, which streams")
    };
    if body.size_hint().lower() > limit as u64 {
        return Err(too_large());
    }
    let mut first = Bytes::new();
    let mut rest = Vec::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| {
            ApiError::new(400, "body_incomplete", format!("the request's body broke off: {error}")).retryable()
        })?;
        let Ok(data) = frame.into_data() else { continue };
        if first.len() + rest.len() + data.len() > limit {
            return Err(too_large());
        }
        // Nearly every body is one chunk, which is passed on without a copy.
        if first.is_empty() && rest.is_empty() {
            first = data;
        } else {
            if rest.is_empty() {
                rest.extend_from_slice(&std::mem::take(&mut first));
            }
            rest.extend_from_slice(&data);
        }
    }
    Ok(if rest.is_empty() { first } else { rest.into() })
}

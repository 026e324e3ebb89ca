//! A request's body, written as it comes.

use std::{mem, time::Duration};

use bytes::Bytes;
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use sandmill_wire::ApiError;

use super::{pool, upload::Upload};

/// What is collected before it is written.
const BATCH_BYTES: usize = 512 << 10;
/// A client that sends nothing for this long is gone.
const STALLED: Duration = Duration::from_secs(120);
/// The same for a stream of messages, whose client sends a keep-alive now and then.
const IDLE: Duration = Duration::from_secs(640);

/// What is read of a body that nobody wants.
const DRAIN_BYTES: usize = 64 << 20;
const DRAIN: Duration = Duration::from_secs(2);

/// The chunks of a body. Errors: 400 `body_incomplete`, 408 `upload_stalled`.
pub struct Chunks {
    body: Incoming,
    patience: Duration,
}

impl Chunks {
    pub fn new(body: Incoming) -> Self {
        Self { body, patience: STALLED }
    }

    /// For a body that comes in messages, with long pauses between them.
    pub fn patient(body: Incoming) -> Self {
        Self { body, patience: IDLE }
    }

    pub async fn next(&mut self) -> Result<Option<Bytes>, ApiError> {
        loop {
            let Ok(frame) = tokio::time::timeout(self.patience, self.body.frame()).await else {
                let message = format!("no data came for {} s", self.patience.as_secs());
                return Err(ApiError::new(408, "upload_stalled", message).retryable());
            };
            match frame.transpose() {
                Ok(None) => return Ok(None),
                Ok(Some(frame)) => {
                    if let Ok(data) = frame.into_data() {
                        return Ok(Some(data));
                    }
                }
                Err(error) => {
                    let message = format!("the request's body broke off: {error}");
                    return Err(ApiError::new(400, "body_incomplete", message).retryable());
                }
            }
        }
    }
}

impl Chunks {
    /// Reads and drops what is left, within bounds. A connection that is answered before its request is read must be
    /// closed, and a client that still sends then may lose the answer.
    pub async fn drain(&mut self) {
        let mut left = DRAIN_BYTES;
        let _ = tokio::time::timeout(DRAIN, async {
            while let Ok(Some(chunk)) = self.next().await {
                left = left.saturating_sub(chunk.len());
                if left == 0 {
                    break;
                }
            }
        })
        .await;
    }
}

/// Where bytes go; called on the pool.
pub trait Sink: Send + 'static {
    /// Takes all of `chunks`, blocking.
    fn write(&mut self, chunks: &mut [Bytes]) -> Result<(), ApiError>;
}

impl Sink for Upload {
    fn write(&mut self, chunks: &mut [Bytes]) -> Result<(), ApiError> {
        Upload::write(self, chunks)
    }
}

/// Writes a body into a sink. While one batch is written, the next one comes in: twice [`BATCH_BYTES`] in memory, about.
///
/// Dropped early, or with an error, the sink is dropped on the pool: closing a large file takes its time.
pub struct Writer<S: Sink> {
    sink: Option<S>,
    batch: Vec<Bytes>,
    size: usize,
    writing: Option<tokio::task::JoinHandle<(S, Result<(), ApiError>)>>,
}

impl<S: Sink> Writer<S> {
    pub fn new(sink: S) -> Self {
        Self { sink: Some(sink), batch: Vec::new(), size: 0, writing: None }
    }

    pub async fn push(&mut self, chunk: Bytes) -> Result<(), ApiError> {
        self.size += chunk.len();
        self.batch.push(chunk);
        if self.size >= BATCH_BYTES {
            self.flush().await?;
        }
        Ok(())
    }

    /// Waits for the last batch and begins with this one.
    async fn flush(&mut self) -> Result<(), ApiError> {
        self.settle().await?;
        let Some(mut sink) = self.sink.take() else { return Err(lost()) };
        let mut batch = mem::take(&mut self.batch);
        self.size = 0;
        self.writing = Some(tokio::task::spawn_blocking(move || {
            let written = sink.write(&mut batch);
            (sink, written)
        }));
        Ok(())
    }

    async fn settle(&mut self) -> Result<(), ApiError> {
        let Some(writing) = &mut self.writing else { return Ok(()) };
        let finished = writing.await;
        self.writing = None;
        let (sink, written) = finished.map_err(|_| lost())?;
        self.sink = Some(sink);
        written
    }

    /// Writes what is left, and gives the sink to `end`, on the pool.
    pub async fn finish<T: Send + 'static>(
        mut self,
        end: impl FnOnce(S) -> Result<T, ApiError> + Send + 'static,
    ) -> Result<T, ApiError> {
        self.settle().await?;
        let Some(mut sink) = self.sink.take() else { return Err(lost()) };
        let mut batch = mem::take(&mut self.batch);
        pool::short(move || {
            sink.write(&mut batch)?;
            end(sink)
        })
        .await?
    }
}

impl<S: Sink> Drop for Writer<S> {
    fn drop(&mut self) {
        if let Some(sink) = self.sink.take() {
            tokio::task::spawn_blocking(move || drop(sink));
        }
    }
}

fn lost() -> ApiError {
    ApiError::new(500, "internal", "the write failed inside the daemon")
}
